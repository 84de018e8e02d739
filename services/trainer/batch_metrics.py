"""The statistics of a batch's samples before they are trained, one row a sample, and the metrics that are made of them.

Each rank fills the rows of its own samples and leaves the others 0; their sum over the data-parallel ranks is the whole table. From it all
ranks get the same loss weights and the same metrics, to the bit. Names of metrics are slime's (docs/metrics.md).
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise

import numpy as np
import torch
import xxhash
from numpy.typing import ArrayLike, NDArray

from services.trainer.packing import PackedBatch
from shared.config.speculation import LENGTHS
from shared.data import pass_rates
from shared.hooks.hook_sample import ENGINE_TIMES, NO_TIMES
from shared.runtime.telemetry import declare_metrics
from shared.schema.messages import Batch
from shared.schema.sample import Sample

Table = NDArray[np.float64]  # The statistics of a batch: float64 [N, columns], exact for integers below 2^53
Sum = Callable[[Table], Table]  # The sum of a table over all data-parallel ranks
LOOP_TIMES = 8  # The least number of repetitions of the phrase that a looping response ends in
LOOP_TOKENS = 64  # The least number of tokens of these repetitions together
LOOP_LONGEST = 256  # The most tokens that the phrase itself has
ROUND_NUMBER = "round_number"  # The key of a sample's metadata with the number of its turns, where its function counts them
TOKEN_MEANS = {
    "advantages": "advantages",
    "log_probs": "proximal_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "kl": "kl",
    "opd_reverse_kl": "opd_reverse_kl",
    "values": "values",
    "returns": "returns",
}
"""Metric of a batch → the field whose mean over trained tokens it is, where the batch has the field."""

RENAMED = {"reward": "raw_reward", "truncated": "truncated_ratio"}  # Batch metrics that are written under slime's names


class StatColumn(IntEnum):
    """trained: tokens with mask 1. masked: tokens masked for their age. response: tokens. rollout: the sample's, in its group.
    oldest: version of the oldest trained token, 0 where there is none. truncated: 1 where generation ran into its limit.
    looping: 1 where the response ends in a loop. rounds: its metadata's ``round_number``, 0 where there is none.
    role: a number of the sample's role, 0 without roles. undrawn: 1 where it is trained and has no log-probs of the rollout's.
    kept: how many tokens its sampler kept at the trained ones, in all.
    latency, queued, decoding, decoded, verified, verifications, drafted, accepted: of its requests to engines
    (`shared.hooks.hook_sample.engine_times`), 0 where not measured."""

    TRAINED = 0
    MASKED = 1
    RESPONSE = 2
    ROLLOUT = 3
    OLDEST = 4
    TRUNCATED = 5
    LOOPING = 6
    ROUNDS = 7
    UNDRAWN = 8
    ROLE = 9
    KEPT = 10
    LATENCY = 11
    QUEUED = 12
    DECODING = 13
    DECODED = 14
    VERIFIED = 15
    VERIFICATIONS = 16
    DRAFTED = 17
    ACCEPTED = 18


def empty_table(samples: int) -> Table:
    """Returns a rank's table before it has read a sample."""
    return np.zeros((samples, len(StatColumn)))


def stats_row(sample: Sample, trainable: int) -> tuple[float, ...]:
    """Returns a sample's row.

    Args:
        sample: with the mask that training goes by. trainable: tokens that its own mask had; those that are missing count as masked.
    """
    trained = int(np.count_nonzero(sample.mask))
    oldest = int(sample.versions()[sample.mask != 0].min()) if trained else 0
    masked = max(trainable - trained, 0)
    length, rounds = len(sample.response), sample.metadata.get(ROUND_NUMBER)
    known = rounds if isinstance(rounds, int | float) and np.isfinite(rounds) else 0
    undrawn = trained > 0 and sample.log_probs is None
    cut, role = sample.finish == "length", xxhash.xxh3_64_intdigest(sample.role.encode()) >> 11 if sample.role else 0  # exact in a float64
    kept = 0 if sample.kept is None else int(sample.kept.counts[sample.mask != 0].sum())
    row = trained, masked, length, sample.rollout, oldest, cut, loops(sample.response), known, undrawn, role, kept
    return *row, *_times(sample.attributes.get(ENGINE_TIMES))


def _times(given: object) -> tuple[float, ...]:
    """Returns what engines measured of a sample; zeros where a function of the user's has put something else in its place."""
    numbers = [*given, *NO_TIMES][: len(NO_TIMES)] if isinstance(given, list) else NO_TIMES
    return tuple(float(one) if isinstance(one, int | float) and np.isfinite(one) else 0.0 for one in numbers)


def engine_metrics(stats: Table) -> dict[str, float]:
    """Returns what samples took of their engines' time, without the prefix ``perf/``, over those for which an engine has measured it."""
    measured = stats[stats[:, StatColumn.LATENCY] > 0]
    decoded = measured[measured[:, StatColumn.DECODING] > 0]
    values = {
        "request/e2e_latency": measured[:, StatColumn.LATENCY],
        "request/queue_time": measured[:, StatColumn.QUEUED],
        "decode/throughput": decoded[:, StatColumn.DECODED] / decoded[:, StatColumn.DECODING],
    }
    reduced = (("mean", np.mean), ("median", np.median), ("max", np.max), ("min", np.min))
    return {f"{name}/{what}": float(by(found)) for name, found in values.items() if len(found) for what, by in reduced}


def metrics_of_batch(batch: Batch, stats: Table) -> dict[str, float]:
    """Returns the metrics of a batch before training: means over samples, ages of trained samples in weight versions.

    masked_tokens: tokens masked for their age, in samples that no filter removed.
    """
    trained = stats[:, StatColumn.TRAINED] > 0
    ages = batch.version - stats[trained, StatColumn.OLDEST] if trained.any() else np.zeros(1)
    return {
        "reward": float(np.mean([reward for group in batch.groups for reward in group.rewards])),
        "response_tokens": float(stats[:, StatColumn.RESPONSE].sum()),
        "tokens": float(sum(sum(group.payload.tokens) for group in batch.groups)),
        "truncated": float(stats[:, StatColumn.TRUNCATED].mean()),
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max()),
        "zero_std_groups": float(np.mean([all(len(set(rewards)) == 1 for rewards in roles) for roles in rewards_by_role(batch, stats)])),
        "masked_tokens": float(stats[:, StatColumn.MASKED].sum()),
        "removed_samples": float(sum(len(group.removed) for group in batch.groups)),
    }


def rollout_metrics(batch: Batch, stats: Table, shaped: Sequence[float] | None) -> dict[str, float]:
    """Returns the metrics of a batch's samples, without the prefix ``rollout/``.

    Args:
        shaped: [N] rewards as advantages start from them; None: the objective has no advantages.
    """
    found = {RENAMED.get(name, name): value for name, value in metrics_of_batch(batch, stats).items()}
    lengths = stats[:, StatColumn.RESPONSE]
    for name, reduced in (("mean", np.mean), ("median", np.median), ("max", np.max), ("min", np.min)):
        found[f"response_len/{name}"] = float(reduced(lengths))
    found["repetition_frac"] = float(stats[:, StatColumn.LOOPING].mean())
    if kept := float(stats[:, StatColumn.KEPT].sum()):
        found["kept_tokens"] = kept / float(stats[:, StatColumn.TRAINED].sum())
    found |= speculation_metrics(stats)
    if shaped is not None:
        found["rewards"] = float(np.mean(shaped))
    return found | zero_std([rewards for roles in rewards_by_role(batch, stats) for rewards in roles])


def rewards_by_role(batch: Batch, stats: Table) -> list[list[list[float]]]:
    """Returns the rewards of each group, role by role: those that are compared with one another."""
    roles, found = iter(stats[:, StatColumn.ROLE].tolist()), []
    for group in batch.groups:
        own: dict[float, list[float]] = {}
        for reward, role in zip(group.rewards, roles, strict=False):
            own.setdefault(role, []).append(reward)
        found.append(list(own.values()))
    return found


def speculation_metrics(stats: Table) -> dict[str, float]:
    """Returns how the samples' drafts were accepted, without the prefix ``rollout/``, as a whole and by the length of responses."""
    lengths, found = stats[:, StatColumn.RESPONSE], dict[str, float]()
    bounds = [(0.0, math.inf, ""), *((below, most, f"_of/{most:g}") for below, most in pairwise((0.0, *LENGTHS)))]
    for below, most, name in bounds:
        tokens, verifications, drafted, accepted = stats[(lengths > below) & (lengths <= most), StatColumn.VERIFIED :].sum(0)
        if verifications:
            found[f"spec_accept_length{name}"] = float(tokens / verifications)
            found[f"spec_accept_rate{name}"] = float(accepted / drafted) if drafted else 0.0
    return found


def multi_turn(stats: Table, longest: int) -> dict[str, float]:
    """Returns the metrics of conversations, without the prefix ``multi_turn/``: response lengths as a whole, and of their trained tokens
    alone (``wo_obs``: without what tools and environments gave); rounds where the samples count them.

    Args:
        longest: the most tokens of a response; those that have as many count as clipped.
    """
    whole, rounds = stats[:, StatColumn.RESPONSE], stats[:, StatColumn.ROUNDS]
    found = {f"raw_response_length/response_length_{name}": value for name, value in _spread(whole).items()}
    found["raw_response_length/response_length_clip_ratio"] = float((whole >= longest).mean())
    trained = _spread(stats[:, StatColumn.TRAINED])
    found |= {f"wo_obs_response_length/response_length_{name}": value for name, value in trained.items()}
    if rounds.any():
        found |= {f"multi_turn_metric/round_number_{name}": value for name, value in _spread(rounds).items()}
    return found


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    return {"mean": float(values.mean()), "max": float(values.max()), "min": float(values.min())}


def zero_std(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Counts the groups of several samples whose rewards are equal, by that reward to one decimal: their advantages are 0."""
    equal = Counter(f"{round(rewards[0], 1) + 0.0:g}" for rewards in groups if len(rewards) > 1 and len(set(rewards)) == 1)
    return {f"zero_std/count_{reward}": float(count) for reward, count in sorted(equal.items())}


def passrate(groups: Sequence[Sequence[float]], threshold: float = 1.0) -> dict[str, float]:
    """Returns ``pass@k`` (`shared.data.pass_rates`) for k = 1, 2, 4, … as far as every group has k samples.

    Args:
        groups: rewards, group by group. threshold: a sample passes with a reward of at least this.
    """
    counts = pass_rates.pass_counts(groups, threshold)
    return {f"pass@{k}": pass_rates.pass_at(counts, k) for k in pass_rates.powers(counts)}


def token_means(micro_batches: Sequence[PackedBatch], total: Sum) -> dict[str, float]:
    """Returns the means over trained tokens of the fields of `TOKEN_MEANS`, of all ranks together; nothing where no token is trained.

    Args:
        micro_batches: this rank's, at least one, with the same fields on every rank. total: a collective.
    """
    names = [name for name, field in TOKEN_MEANS.items() if field in micro_batches[0].fields]
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    for batch in micro_batches:
        trained = batch.loss_mask > 0
        for column, name in enumerate(names):
            sums[column] += batch.fields[TOKEN_MEANS[name]][trained].double().sum()
        sums[-1] += trained.sum()
    *values, tokens = total(sums.numpy()).tolist()
    return {name: value / tokens for name, value in zip(names, values, strict=True)} if tokens else {}


def loops(response: ArrayLike) -> bool:
    """Returns whether a response, int [R], ends in a loop: its last tokens repeat one phrase until generation stopped."""
    tail = np.asarray(response)[-LOOP_TIMES * LOOP_LONGEST :]
    if len(tail) < LOOP_TOKENS:
        return False
    backwards = tail[::-1]
    candidates = np.flatnonzero(backwards[1 : len(tail) // LOOP_TIMES + 1] == backwards[0]) + 1
    for period in candidates.tolist():
        span = max(LOOP_TIMES * period, LOOP_TOKENS)
        if np.array_equal(backwards[: span - period], backwards[period:span]):
            return True
    return False


declare_metrics("""
    rollout/response_len/(mean;median;max;min) | tokens | (mean length of the responses; their median; the longest; the shortest)
    rollout/truncated_ratio | share | responses that ran into `rollout_max_response_len`
    rollout/repetition_frac | share | responses that end in a loop: their last tokens are one phrase of at most 256 tokens, said at least 8
        times in a row over at least 64 tokens, until generation stopped
    rollout/raw_reward | reward | mean of the rewards as they were scored, or as `custom_reward_post_process_path` shows them
    rollout/rewards | reward | mean of the rewards as advantages start from them: normalised in their groups, where the estimator does that
        | unless `loss_type` is `sft_loss`
    rollout/zero_std/count_<reward> | groups | groups of several samples whose rewards are all equal, by that reward to one decimal | once
        there was such a group; then 0 where there is none
    rollout/zero_std_groups | share | groups whose rewards are all equal
    rollout/advantages | | mean over tokens of the advantages, whitened where they are | unless `loss_type` is `sft_loss`
    rollout/log_probs | nats | mean over tokens of the trainer's log-probs before the first optimizer step | where it computes them
    rollout/rollout_log_probs | nats | mean over tokens of the engine's log-probs | not of a batch in which samples [have
        none](hooks.md#generating)
    rollout/ref_log_probs | nats | mean over tokens of the reference policy's log-probs | where there is one
    rollout/kl | nats | mean over tokens of the KL that rewards are charged with | where they are
    rollout/opd_reverse_kl | nats | mean over tokens of what the policy's log-prob is above the teacher's: the reverse KL | where there is a
        teacher
    rollout/values | reward | mean over tokens of the critic's values | where there is one
    rollout/returns | reward | mean over tokens of what the critic learns | where there is one
    rollout/tokens | tokens | prompts and responses together
    rollout/response_tokens | tokens | responses
    rollout/staleness_mean | versions | mean over samples of the batch's version less that of the oldest trained token
        ([staleness](staleness.md))
    rollout/staleness_max | versions | the largest of them
    rollout/masked_tokens | tokens | tokens that left the loss for their age
    rollout/removed_samples | samples | samples that a filter took out of the loss
    rollout/spec_accept_length | tokens | that a verification of drafts brought, over a step's samples | with [speculation](speculation.md)
    rollout/spec_accept_rate | share | drafted tokens that were accepted | with [speculation](speculation.md)
    rollout/spec_accept_length_of/<tokens> | tokens | the same, over responses of at most so many tokens, and more than the bound before |
        with [speculation](speculation.md)
    rollout/spec_accept_rate_of/<tokens> | share | the same | with [speculation](speculation.md)
    rollout/kept_tokens | tokens | how many tokens the sampler kept for each trained one, a mean | with
        [support replay](trainer.md#support-replay)

    multi_turn/raw_response_length/response_length_(mean;max;min) | tokens |
        (mean length of responses, with what tools and environments gave; the longest; the shortest)
    multi_turn/wo_obs_response_length/response_length_(mean;max;min) | tokens |
        (mean length of the responses' trained tokens alone; the longest; the shortest)
    multi_turn/raw_response_length/response_length_clip_ratio | share | responses with `rollout_max_response_len` tokens or more
    multi_turn/multi_turn_metric/round_number_(mean;max;min) | rounds |
        (mean of the samples' `metadata["round_number"]`; the most; the fewest) | where a function counts its rounds
    passrate/pass@<k> | probability | that one of k samples of a prompt passes, k = 1, 2, 4, … up to the samples of a group; a sample passes
        with a reward of at least `passrate_threshold`

    critic/loss | reward² | what is minimised: the value loss
    (train;critic)/grad_norm | | L2 norm of the last optimizer step's gradient, before clipping
    (train;critic)/lr | | learning rate of the last optimizer step
    train/support_mismatch | | 1: samples come from another distribution than the one that is trained, and log-probs are of the latter |
        where [support replay](trainer.md#support-replay) does not reach: it is off or cannot be, or flags of SGLang's do more than truncate
    critic/step_time | s | the critic's optimizer steps, with reading what they need
    sft/loss | nats a token | mean over the trained tokens of the step's batch
    sft/lr | | learning rate of the step

    (train;critic)/load_balancing_loss | | how unevenly experts are used in a micro-batch: a mean over layers, 1 where all are used alike |
        with `moe_router_load_balancing_type` `aux_loss` and a coefficient
    (train;critic)/seq_load_balancing_loss | | the same in a sequence | with `seq_aux_loss`
    (train;critic)/global_load_balancing_loss | | the same in the optimizer step so far | with `global_aux_loss`
    (train;critic)/z_loss | nats² | mean over tokens and layers of the routers' squared logsumexp | with `moe_z_loss_coeff`
    train/mtp_loss | nats a token | the draft layers' mean negative log-likelihood of the trained tokens that they predict | with
        `enable_mtp_training`
    train/mtp_accuracy | share | trained tokens that the draft layers would have chosen | with `enable_mtp_training`

    rewards/<part>/(mean;std;min;max) | reward | (mean; standard deviation; the smallest; the largest)

    eval/<name> | reward | mean reward of the samples of that set
    eval/<name>-pass@<k> | probability | that one of k samples of a prompt passes
    eval/<name>-pass^<k> | probability | that all of k samples of a prompt pass
    eval/<name>-truncated_ratio | share | samples that ended at their length
    eval/<name>/response_len/(mean;median;min;max;p90;p99) | tokens |
        (mean length of the responses; their median; the shortest; the longest; a tenth of them is longer; a hundredth of them is longer)
    eval/<name>/version | version | that the figures are of
    eval/<name>/newest_version | version | the newest that drew some of their tokens
    eval/<name>/lag | versions | by how many they were behind the live version when they were known
    eval/<name>/samples | samples | that the figures are of
    eval/<name>/failed | prompts | prompts without rewards
    eval/<name>/late | prompts | those that had not come back at `eval_timeout`
    eval/<name>/seconds | s | how long it took

    perf/request/e2e_latency/mean | s | that a sample's requests were in the engine, waiting included | of samples for which an engine
        has measured it: its own, and those of functions that pass its `meta_info`; none of agents at gateways
    perf/request/e2e_latency/(median;max;min) | s | (their median; the longest; the shortest) | as the mean
    perf/request/queue_time/(mean;median;max;min) | s |
        (of it, in the engine's queue; their median; the longest; the shortest) | as the latency
    perf/decode/throughput/(mean;median;max;min) | tokens/s |
        (at which one sample was decoded, beside others; their median; the fastest; the slowest) | as the latency
    perf/step_time | s | from the batch's arrival to the end of its last optimizer step
    perf/actor_train_time | s | its optimizer steps alone, without reading samples and without log-probs
    perf/train_wait_time | s | between two steps: waiting for a batch, pushing, saving
    perf/train_idle_time | s | of it, waiting for a batch, or for what is to be done next; with the next seven it is the time from one
        step's end to the next one's, train_wait_time + step_time
    perf/train_prepare_time | s | reading samples, packing, advantages
    perf/train_log_probs_time | s | log-probs of the policy, the reference and the teacher
    perf/train_gradient_time | s | forward and backward passes
    perf/train_optimizer_time | s | optimizer steps
    perf/train_push_time | s | beginning pushes of weights (or, on shared GPUs, all of them)
    perf/train_save_time | s | writing checkpoints
    perf/train_rest_time | s | metrics, reports, and on shared GPUs giving and taking them
    perf/wait_time_ratio | share | train_wait_time / (train_wait_time + step_time)
    perf/actor_train_computed_tokens | tokens | of the batch's tokens, those that one pass computes: what [sequences begin with
        alike](trainer.md#shared-beginnings) counts once. `rollout/tokens` counts all
    perf/actor_train_tok_per_s | tokens/s | tokens of prompts and responses / actor_train_time, of all ranks together: the speed of
        computing
    perf/wall_tok_per_s | tokens/s | the same tokens / (train_wait_time + step_time): the speed of the run, waiting included. Times that
        time, summed over the steps, it is the tokens that were trained | from a trainer's second step on
    perf/actor_train_tflops | TFLOP/s | operations of the batch's forward and backward passes, of computed tokens / actor_train_time, of
        each rank
    perf/actor_train_mfu | share | that over the device's peak for dense bfloat16 | where the peak is known and training is not in float32
    perf/update_weights_time | s | a push of weights, from the offer to the last commit; its step is the version
    perf/update_weights_wire_time | s | of it, from the first bucket's export until the last engine had loaded and checked everything
    perf/update_weights_pause_time | s | from the request until the slowest engine was paused, beside the transfer
    perf/update_weights_transfer_time | s | from the first bucket's export until the last engine had loaded everything
    perf/update_weights_check_time | s | comparing the engines' digests with the trainer's
    perf/update_weights_activate_time | s | the commit, until every engine had continued
    perf/update_weights_stall | s | of it, what the trainer waited for; the rest ran beside a training step
    perf/update_weights_bytes | bytes | what it carried
    perf/update_weights_gb_per_s | GB/s | update_weights_bytes / update_weights_wire_time

    step | steps | that are trained; the critic's own in its process
    version | version | that the trainer pushed last
    loss | | `train/loss` of the newest step
    grad_norm | | `train/grad_norm` of the newest step, `critic/grad_norm` in the critic's process
    reward | reward | mean reward of the newest batch, as it was scored
    staleness_(mean;max) | versions | `rollout/staleness_(mean;max)` of the newest step
    (masked_tokens;removed_samples) | (tokens;samples) | `rollout/(masked_tokens;removed_samples)` of the newest step
    wait_time_ratio | share | `perf/wait_time_ratio` of the newest step
    train_tokens_per_s | tokens/s | `perf/wall_tok_per_s` of the newest step: waiting included; the panel's *training*
    train_compute_tokens_per_s | tokens/s | `perf/actor_train_tok_per_s` of the newest step; the panel's *computing*
    push_(seconds;stall_seconds;gb_per_s) | (s;s;GB/s) | `perf/update_weights_(time;stall;gb_per_s)` of the newest push
    value_(loss;clipfrac) | (reward²;share) | `critic/value_(loss;clipfrac)` of the newest step | in the critic's process
    sft_step | steps | how far the warm start is | from its first step on
    sft_steps | steps | of the whole warm start | from its first step on
    sft_loss | nats a token | its newest loss | from its first step on
    sft_seconds_left | s | its rest at its pace so far | from its second step on
""")
