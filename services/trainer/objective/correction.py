"""Off-policy correction for samples of another policy: weights, rejections and masks, never part of the gradient.

Behaviour policy: the engine's, log-probs as it gave them with the tokens. Proximal policy: the trainer's at batch
start. The decoupled objective clips around the proximal policy and weights by proximal over behaviour: Hilton et al.
2022 (arXiv:2110.00641, "Batch size-invariance for policy optimization", section 3), AReaL (arXiv:2505.24298).
All tensors are [T], finite everywhere. Some of it needs statistics of a whole optimizer step: of every rank's tokens, once, before it.

Behind it, how the log-probs of engine and trainer differ over a step's tokens: estimates of the KL, and the differences' distribution.
Metrics of a loss are sums over micro-batches and ranks, so it is counted in bins, and by where tokens stand; `summarised` makes of the
counts what is reported.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.trainer.objective.policy_gradient import ratio_of
from services.trainer.objective.reduce import MaskedTokens, Metrics, sequence_mean, sequence_sum
from services.trainer.packing import PackedBatch
from shared.config.algorithm import AlgorithmSection, Level
from shared.runtime.telemetry import declare_metrics

declare_metrics("""
    train/tis | ratio | mean importance weight of the trainer's policy over the engine's, before it is clamped | where the objective
        corrects by it
    train/tis_clipfrac | share | tokens whose weight is clamped or masked | where the objective corrects by it
    train/rs_clipfrac | share | tokens that rejection sampling takes out | with `use_rs`
    train/rs_veto_frac | share | tokens of sequences that one token far out takes out | with `rs_veto_threshold`
""")

# The one-dimensional float64 tensors (on the CPU, of any length) of all data-parallel ranks, end to end
Gather = Callable[[Tensor], Tensor]


class ImportanceWeight(NamedTuple):
    """weight: floats [T], detached. ratio: the same before its bounds. changed: bool [T], true where they took effect."""

    weight: Tensor
    ratio: Tensor
    changed: Tensor


@dataclass(frozen=True)
class Statistics:
    """mean_weight: of the bounded importance weights that are not 0. second_moment_limit: as the function has it. None: not asked."""

    mean_weight: float | None = None
    second_moment_limit: float | None = None


def level_ratio(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, level: Level) -> Tensor:
    """Returns each token's ratio (``token``), or for every token of a sequence that of all its trained tokens (``sequence``), or its
    geometric mean over them (``geometric``): [T], detached. Log ratios are clamped to +-20 before ``exp``.

    Source: MIS, Liu et al. 2025, "When speed kills stability"; the geometric mean, GSPO (arXiv:2507.18071).
    """
    log_ratio = log_ratio.detach()
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio * mask.to(log_ratio.dtype), cu_seqlens)
    elif level == "geometric":
        log_ratio = sequence_mean(log_ratio, mask, cu_seqlens)
    return ratio_of(log_ratio)


def importance_weight(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, config: AlgorithmSection) -> ImportanceWeight:
    """Returns the ratio of the config's level, bounded: ``truncate`` bounds it by ``tis_clip``, ``clip`` by ``tis_clip_low`` too, ``mask``
    makes it 0 outside of both.

    Args:
        log_ratio: log-probs of the proximal policy less the behaviour policy's [T]. mask: bool [T]. cu_seqlens: int32 [S + 1].

    Source: TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; mask, IcePop, Ling
    team 2025 (arXiv:2510.18855).
    """
    ratio, low, high = level_ratio(log_ratio, mask, cu_seqlens, config.tis_level), config.tis_clip_low, config.tis_clip
    if config.tis_mode == "mask":
        weight = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    else:
        weight = ratio.clamp(min=low if config.tis_mode == "clip" else None, max=high)
    return ImportanceWeight(weight, ratio, weight != ratio)


def off_policy_sequence_mask(d: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor, delta: float) -> Tensor:
    """Returns a mask [T], false where A < 0 and the sequence's mean of ``d`` is above delta.

    Args:
        d: log-probs of the old policy, the one that the ratio is to, less those of the policy being trained [T]. delta: nats per token.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, off-policy sequence masking. There the old policy is the engine's, as with
    ``off_policy`` rollout.
    """
    distance = sequence_mean(d.detach(), mask, cu_seqlens)
    return ~((advantages < 0) & (distance > delta))


def second_moments(log_probs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns ``x^2`` where a clip could bound the token, 0 elsewhere: [T], detached. mask: bool [T].

    With ``x = log pi_theta - log pi_behaviour`` a clip could bound tokens with A > 0 and x > 0, or A < 0 and x < 0. M2PO bounds their mean:
    those with the largest x^2 are masked until the mean of the others is at most the bound.

    Source: M2PO, Zheng et al. 2025, "Prosperity before collapse" (arXiv:2510.01161), algorithm 1.
    """
    x = (log_probs - behaviour).detach()
    return torch.where(mask & (x * torch.sign(advantages) > 0), x.square(), 0.0)


def second_moment_limit(moments: Tensor, bound: float) -> float:
    """Returns the limit above which moments are masked: the largest that leaves a mean of at most ``bound``.

    Args:
        moments: of the whole batch, any shape; zeros do not count.

    It lies half-way between the largest kept moment and the smallest masked, so that rounding moves no token over it. Equal ones stay or
    go together. Returns inf where all stay, 0 where none does.
    """
    ordered = moments.double().flatten()
    ordered = ordered[ordered > 0].sort().values
    if not ordered.numel():
        return math.inf
    means = ordered.cumsum(0) / torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    last_of_equals = torch.ones_like(ordered, dtype=torch.bool)
    last_of_equals[:-1] = ordered[:-1] < ordered[1:]
    stays = torch.nonzero(last_of_equals & (means <= bound)).flatten()
    if not stays.numel():
        return 0.0
    place = int(stays[-1])
    return math.inf if place == ordered.numel() - 1 else float(ordered[place] + ordered[place + 1]) / 2


def batch_statistics(config: AlgorithmSection, batches: Sequence[PackedBatch], gather: Gather = lambda values: values) -> Statistics:
    """Returns the statistics of one optimizer step that the config asks for. A collective if ``gather`` is one.

    Args:
        batches: this rank's micro-batches, with fields ``weights``, ``advantages``, ``rollout_log_probs``, ``proximal_log_probs``.
    """
    sums, moments = torch.zeros(2, dtype=torch.float64), [torch.zeros(0, dtype=torch.float64)]
    for batch in batches:
        tokens = MaskedTokens(batch.fields["proximal_log_probs"], batch)
        start, rollout = tokens.log_probs, tokens.field("rollout_log_probs")
        if config.tis_batch_normalize:
            weights = importance_weight(start - rollout, tokens.mask, batch.cu_seqlens, config).weight.double()
            counts = tokens.mask.double()
            if config.tis_level != "token":  # a sequence is one weight
                counts = counts / sequence_sum(counts, batch.cu_seqlens).clamp(min=1.0)
            counts = counts * (weights > 0)  # what is masked out has no weight
            sums += torch.stack([(counts * weights).sum(), counts.sum()]).cpu()
        if config.use_m2po:
            of_batch = second_moments(start, rollout, tokens.field("advantages"), tokens.mask)
            moments.append(of_batch[of_batch > 0].double().cpu())
    mean_weight, limit = None, None
    if config.tis_batch_normalize:
        total, count = gather(sums).view(-1, 2).sum(0).tolist()
        mean_weight = total / count if total > 0.0 else 1.0  # where every weight is 0, there is nothing to scale
    if config.use_m2po:
        limit = second_moment_limit(gather(torch.cat(moments)), config.m2_threshold)
    return Statistics(mean_weight, limit)


def weighted(
    config: AlgorithmSection, pg: Tensor, log_ratio: Tensor, tokens: MaskedTokens, statistics: Statistics
) -> tuple[Tensor, Metrics]:
    """Returns the per-token loss times its importance weight, 0 for rejected tokens and sequences: [T]; and the metrics of both.

    A veto rejects a sequence of which a trained token has a ratio below the threshold: the trainer's policy would hardly have sampled it.

    Args:
        log_ratio: log-probs of the proximal policy less the behaviour policy's [T].

    Source: rejection sampling and vetoes of MIS, Liu et al. 2025, "When speed kills stability".
    """
    cu_seqlens = tokens.batch.cu_seqlens
    weights = importance_weight(log_ratio, tokens.mask, cu_seqlens, config)
    metrics = {"tis": tokens.mean(weights.ratio), "tis_clipfrac": tokens.fraction(weights.changed)}
    pg = pg * weights.weight
    if config.tis_batch_normalize:
        assert statistics.mean_weight is not None
        pg = pg / statistics.mean_weight
    if config.use_rs:
        ratio, (low, high) = level_ratio(log_ratio, tokens.mask, cu_seqlens, config.rs_level or config.tis_level), config.rejection_bounds
        stays = (ratio >= low) & (ratio <= high)
        pg = pg * stays
        metrics["rs_clipfrac"] = tokens.fraction(~stays)
    if config.rs_veto_threshold is not None:
        below = tokens.mask & (ratio_of(log_ratio.detach()) < config.rs_veto_threshold)
        gone = sequence_sum(below.to(tokens.dtype), cu_seqlens) > 0
        pg = pg * ~gone
        metrics["rs_veto_frac"] = tokens.fraction(gone)
    return pg, metrics


PREFIX = "mismatch_count_"
EDGES = tuple(10.0 ** (step / 4) for step in range(-28, 5))  # nats; of the bins, the last of which is open
PLACES = (256, 1024, 4096)  # tokens; of the ranges of places and lengths, the last of which is open
FEWEST = 100  # tokens of an expert that is named, counted in each layer

declare_metrics("""
    train/mismatch_k1 | nats | mean of log q − log p, of the engine's probability q and the trainer's p: an unbiased estimate of KL(q, p)
    train/mismatch_k2 | nats | mean of its half square: biased, of little variance
    train/mismatch_k3 | nats | mean of p/q − 1 − log p/q: an estimate of the same KL without bias, never negative
    train/mismatch_p99 | nats | the difference of log-probs that 99 % of the tokens do not exceed, rounded up by less than 78 %
    train/mismatch_max | nats | the largest one, rounded up likewise; 10 where it is larger
    train/mismatch_beyond | share | tokens whose difference is beyond `logprob_alarm`, or a bin's edge above it
    train/mismatch_at_<n> | nats | mean difference of tokens up to place n of a sequence, behind the next smaller n (256, 1024, 4096, inf)
    train/mismatch_of_<n> | nats | the same of sequences of such a length
    train/mismatch_expert | | with replayed routing: the expert whose tokens differ most, by its number in a layer, over all layers
    train/mismatch_expert_mean | nats | mean difference of its tokens; near the mean of all where no expert stands out
""")


def counts(start: Tensor, rollout: Tensor, tokens: MaskedTokens) -> dict[str, Tensor]:
    """Returns the metrics of a micro-batch. ``start``, ``rollout``: log-probs of trainer and engine [T], 0 where the mask is 0."""
    ratio, trained = (start - rollout).detach(), tokens.mask.to(tokens.dtype)
    found = {
        "mismatch_k1": tokens.mean(-ratio),
        "mismatch_k2": tokens.mean(ratio.square() / 2),
        "mismatch_k3": tokens.mean(ratio.clamp(max=20.0).expm1() - ratio),
    }
    difference, starts = ratio.abs(), tokens.batch.cu_seqlens.long()
    found |= _counted("bin", difference, EDGES, trained)
    lengths = starts.diff()
    every = torch.arange(len(ratio), device=ratio.device)
    place = every - torch.repeat_interleave(starts[:-1], lengths, output_size=len(ratio))
    length = torch.repeat_interleave(lengths, lengths, output_size=len(ratio))
    for name, at in (("at", place), ("of", length)):
        found |= _counted(f"{name}_tokens", at, PLACES, trained) | _counted(f"{name}_sum", at, PLACES, trained * difference)
    if tokens.batch.experts is not None:
        chosen, count = tokens.batch.experts.to(ratio.device).flatten(1).long(), tokens.batch.num_experts
        for name, each in (("tokens", trained), ("sum", trained * difference)):
            known = torch.where(chosen < 0, 0, each[:, None])
            found |= _summed(f"expert_{name}", chosen.clamp(min=0).flatten(), count, known.flatten())
    return found


def _counted(name: str, values: Tensor, edges: tuple[float, ...], weights: Tensor) -> dict[str, Tensor]:
    bounds = torch.tensor(edges).to(values.device, non_blocking=True)
    return _summed(name, torch.bucketize(values, bounds), len(edges) + 1, weights)


def _summed(name: str, bins: Tensor, count: int, weights: Tensor) -> dict[str, Tensor]:
    sums = weights.new_zeros(count).index_add(0, bins, weights)
    return {f"{PREFIX}{name}_{index}": one for index, one in enumerate(sums)}


def summarised(metrics: Mapping[str, float], bound: float) -> dict[str, float]:
    """Returns a step's metrics with what the counts say in their place. ``bound``: of a difference, in nats."""
    rest = {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}
    bins = [metrics.get(f"{PREFIX}bin_{index}", 0.0) for index in range(len(EDGES) + 1)]
    if not (total := sum(bins)) or not math.isfinite(total):
        return rest
    tops = [*EDGES, EDGES[-1]]
    share = [sum(bins[: index + 1]) / total for index in range(len(bins))]
    rest["mismatch_p99"] = next(top for top, below in zip(tops, share, strict=True) if below >= 0.99 - 1e-9)
    rest["mismatch_max"] = max(top for top, one in zip(tops, bins, strict=True) if one)
    rest["mismatch_beyond"] = 1 - next(below for top, below in zip(tops, [*share[:-1], 1.0], strict=True) if top >= min(bound, EDGES[-1]))
    return rest | _means(metrics)


def _means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the mean difference of each range of places and of lengths that has tokens, and of the expert with the largest."""
    found = {}
    for name in ("at", "of"):
        for index, edge in enumerate((*PLACES, math.inf)):
            if tokens := metrics[f"{PREFIX}{name}_tokens_{index}"]:
                found[f"mismatch_{name}_{edge}"] = metrics[f"{PREFIX}{name}_sum_{index}"] / tokens
    of_expert = f"{PREFIX}expert_tokens_"
    means = {
        int(name.removeprefix(of_expert)): metrics[name.replace("tokens", "sum")] / tokens
        for name, tokens in metrics.items()
        if name.startswith(of_expert) and tokens >= FEWEST
    }
    if means:
        worst = max(means, key=means.__getitem__)
        found |= {"mismatch_expert": float(worst), "mismatch_expert_mean": means[worst]}
    return found
