"""Metrics of a batch: loops, lengths, equal groups, passes; sums over ranks."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.metrics_page import declared_metrics
from services.trainer import batch_metrics
from services.trainer.batch_metrics import LOOP_LONGEST, LOOP_TIMES, LOOP_TOKENS, TOKEN_MEANS, StatColumn, Table, empty_table, token_means
from services.trainer.metrics_logger import RewardParts, evaluation_metrics
from services.trainer.packing import PackedBatch, pack, spread
from services.trainer.step_profiler import STEP_PARTS
from shared.hooks.hook_sample import ENGINE_TIMES, HookSample
from shared.schema.messages import Batch, BatchGroup, EvalFigures, Payload, RewardPart
from shared.schema.sample import Sample
from tests.support.tables import table
from tests.support.train_samples import train_sample
from tests.support.valid_messages import example


def says(*tokens: int, times: int = 1) -> list[int]:
    return list(tokens) * times


@table(
    ("response", "expected"),
    [
        ([], False),
        (says(7, times=LOOP_TOKENS - 1), False),
        (says(7, times=LOOP_TOKENS), True),
        (list(range(500)) + says(7, times=LOOP_TOKENS), True),
        ([*says(7, times=LOOP_TOKENS), 2], False),  # it found its end
        (says(*range(10), times=LOOP_TIMES), True),
        (says(*range(10), times=LOOP_TIMES - 1), False),
        ([99, *says(*range(10), times=LOOP_TIMES)], True),
        (says(*range(10), times=LOOP_TIMES) + says(0, 1, 2), True),  # cut off in the middle of the phrase
        (says(*range(LOOP_LONGEST), times=LOOP_TIMES), True),
        (says(*range(LOOP_LONGEST + 1), times=2 * LOOP_TIMES), False),
        (list(range(4000)), False),
    ],
)
def test_a_response_that_ends_in_a_loop_is_known(response: list[int], expected: bool) -> None:
    assert batch_metrics.loops(np.array(response, dtype=np.int32)) is expected


def test_random_text_does_not_loop() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, size=(200, 400))
    assert not any(batch_metrics.loops(row) for row in tokens)


def batch_of(rewards: list[list[float]], lengths: list[int], truncated: list[int], looping: list[int]) -> tuple[Batch, Table]:
    groups = [
        BatchGroup(group=f"g{index}", payload=Payload(keys=["k"], bytes=1, tokens=(2,) * len(of_group)), rewards=of_group)
        for index, of_group in enumerate(rewards)
    ]
    table = empty_table(len(lengths))
    for column, values in ((StatColumn.RESPONSE, lengths), (StatColumn.TRUNCATED, truncated), (StatColumn.LOOPING, looping)):
        table[:, column] = values
    return Batch(step=0, version=0, groups=groups), table


def test_metrics_of_the_samples() -> None:
    batch, stats = batch_of([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]], [10, 20, 30, 40, 50, 90], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1])
    found = batch_metrics.rollout_metrics(batch, stats, [0.0, 0.0, 0.0, 0.0, -0.5, 0.5])
    expected = {
        "response_len/mean": 40,
        "response_len/median": 35,
        "response_len/max": 90,
        "response_len/min": 10,
        "truncated_ratio": 0.5,
        "repetition_frac": 1 / 6,
        "raw_reward": 0.5,
        "rewards": 0.0,
        "zero_std/count_0": 1,
        "zero_std/count_1": 1,
        "zero_std_groups": 2 / 3,
        "tokens": 12,
        "response_tokens": 240,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert "rewards" not in batch_metrics.rollout_metrics(batch, stats, None)


def test_equal_groups_are_told_by_their_reward() -> None:
    groups = [[-1.0, -1.0], [0.04, 0.04], [-0.04, -0.04], [0.5, 0.5], [0.5, 0.5], [0.5, 0.4], [3.0]]
    assert batch_metrics.zero_std(groups) == {"zero_std/count_-1": 1, "zero_std/count_0": 2, "zero_std/count_0.5": 2}


def test_pass_at_k_goes_as_far_as_every_group_does() -> None:
    assert batch_metrics.passrate([[1.0] * 8, [0.0] * 8]) == {"pass@1": 0.5, "pass@2": 0.5, "pass@4": 0.5, "pass@8": 0.5}
    assert list(batch_metrics.passrate([[1.0] * 8, [0.0] * 7])) == ["pass@1", "pass@2", "pass@4"]
    assert batch_metrics.passrate([]) == {}
    assert batch_metrics.passrate([[0.4, 0.6]], threshold=0.5) == {"pass@1": 0.5, "pass@2": 1.0}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=7), min_size=1, max_size=3))
def test_pass_at_k_is_the_mean_over_all_draws(groups: list[list[float]]) -> None:
    found = batch_metrics.passrate(groups)
    for k in (1, 2, 4):
        drawn = [[max(draw) >= 1.0 for draw in itertools.combinations(rewards, k)] for rewards in groups]
        assert found[f"pass@{k}"] == pytest.approx(np.mean([np.mean(draws) for draws in drawn]))


def micro_batch(seed: int, mask: list[int]) -> PackedBatch:
    response = len(mask)
    sample = train_sample([1], range(response), mask=np.array(mask, np.uint8))
    values = torch.as_tensor(np.random.default_rng(seed).normal(size=response))
    packed = pack([sample], [1.0])
    return packed.with_fields(kl=spread([sample], [values], "kl"), advantages=spread([sample], [2 * values], "advantages"))


def test_sums_of_ranks_give_the_means_of_all_tokens() -> None:
    ranks = [[micro_batch(1, [1, 0, 1]), micro_batch(2, [0])], [micro_batch(3, [1, 1, 1, 0, 1])]]
    sums: list[np.ndarray] = []

    def kept(table: np.ndarray) -> np.ndarray:
        sums.append(table)
        return table

    for own in ranks:
        token_means(own, kept)
    total = token_means(ranks[0], lambda _: np.sum(sums, axis=0))
    for name in ("kl", "advantages"):
        values = torch.cat([batch.fields[name][batch.loss_mask > 0] for own in ranks for batch in own])
        assert total[name] == pytest.approx(values.mean().item())


def test_where_nothing_is_trained_there_is_no_mean() -> None:
    assert token_means([micro_batch(0, [0, 0, 0])], lambda table: table) == {}


def test_conversations_are_measured_with_and_without_what_tools_gave() -> None:
    stats = empty_table(3)
    stats[:, StatColumn.RESPONSE], stats[:, StatColumn.TRAINED] = [10, 20, 60], [10, 5, 30]
    found = batch_metrics.multi_turn(stats, 20)
    assert found == {
        "raw_response_length/response_length_mean": 30.0,
        "raw_response_length/response_length_max": 60.0,
        "raw_response_length/response_length_min": 10.0,
        "raw_response_length/response_length_clip_ratio": pytest.approx(2 / 3),
        "wo_obs_response_length/response_length_mean": 15.0,
        "wo_obs_response_length/response_length_max": 30.0,
        "wo_obs_response_length/response_length_min": 5.0,
    }
    stats[:, StatColumn.ROUNDS] = [1, 2, 6]
    rounds = {name: value for name, value in batch_metrics.multi_turn(stats, 20).items() if name not in found}
    assert rounds == {f"multi_turn_metric/round_number_{name}": value for name, value in {"mean": 3.0, "max": 6.0, "min": 1.0}.items()}


@table(("metadata", "rounds"), [({"round_number": 3}, 3), ({}, 0), ({"round_number": "many"}, 0), ({"round_number": None}, 0)])
def test_rounds_are_those_that_a_sample_counts(metadata: dict[str, object], rounds: int) -> None:
    assert batch_metrics.stats_row(example(Sample, metadata=metadata), 1)[StatColumn.ROUNDS] == rounds


def test_engines_times_are_of_the_samples_for_which_they_are_measured() -> None:
    """As SGLang's ``meta_info`` has them, summed over a sample's requests; whatever else stands in their place counts as none."""
    first = {"e2e_latency": 3.0, "queue_time": 1.0, "completion_tokens": 11, "decode_throughput": 1e9, "finish_reason": None}
    first |= {"prefill_finished_time": 100.0, "request_finished_ts": 101.0}
    first |= {"spec_verify_ct": 4, "spec_num_proposed_drafts": 12, "spec_num_correct_drafts": 7}
    asked = HookSample()
    for meta in (first, first | {"queue_time": None, "request_finished_ts": 100.25}, {"finish_reason": None}):
        asked.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta)
    times = getattr(asked, ENGINE_TIMES)
    assert times == [6.0, 1.0, 1.25, 20.0, 22.0, 8.0, 24.0, 14.0]
    assert getattr(HookSample(**vars(asked)), ENGINE_TIMES) == times and ENGINE_TIMES not in vars(HookSample())
    stats = empty_table(5)
    for row, value in enumerate([times, [2.0], None, "many", [float("nan"), 1, 2]]):
        attributes = {} if value is None else {ENGINE_TIMES: value}
        stats[row] = batch_metrics.stats_row(example(Sample, attributes=attributes), 1)
    found = batch_metrics.engine_metrics(stats)
    assert {name: found[name] for name in found if name.endswith(("mean", "max"))} == {
        **{"request/e2e_latency/mean": 4.0, "request/e2e_latency/max": 6.0, "request/queue_time/mean": 0.5, "request/queue_time/max": 1.0},
        **{"decode/throughput/mean": 16.0, "decode/throughput/max": 16.0},
    }
    accepted = {"spec_accept_length": 2.75, "spec_accept_rate": 14 / 24}
    assert batch_metrics.speculation_metrics(stats) == accepted | {f"{name}_of/256": value for name, value in accepted.items()}
    assert batch_metrics.engine_metrics(empty_table(2)) == batch_metrics.speculation_metrics(empty_table(2)) == {}


# --- the trainer's metrics are declared, no more and no less than the code measures: docs/metrics.md is made of the declarations

ROOT = Path(__file__).parents[3]
DECLARED = declared_metrics()


def declared(prefix: str) -> set[str]:
    return {spec.name.removeprefix(f"{prefix}/") for spec in DECLARED[f"{prefix}/"]}


def test_every_rollout_metric_is_declared() -> None:
    group = BatchGroup(group="g", payload=Payload(keys=["k"], bytes=1, tokens=(3, 4)), rewards=[1.0, 1.0])
    found = batch_metrics.rollout_metrics(Batch(step=0, version=0, groups=[group]), empty_table(2) + 1, [0.0, 0.0])
    names = {re.sub("_of/.*", "_of/<tokens>", re.sub("count_.*", "count_<reward>", name)) for name in found}
    assert declared("rollout") == names | set(TOKEN_MEANS)
    assert declared("passrate") == {re.sub(r"@\d+", "@<k>", name) for name in batch_metrics.passrate([[1.0, 0.0]])}


def test_every_metric_of_the_losses_is_declared() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "services" / "trainer" / "objective").glob("*.py"))
    assigned, listed = r'metrics\["(\w+)"\] = ', r'"(\w+)": (?:tokens\.(?:mean|fraction)|\w+\.detach|\(?same)'
    made = set(re.findall(assigned, sources)) | set(re.findall(listed, sources))
    critic = {name for name in made if name.startswith("value_")}
    balance = {"load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss"}
    assert len(made) > 12
    drafts = {"mtp_loss", "mtp_accuracy"}
    made |= {
        f"mismatch_{name}" for name in ("p99", "max", "beyond", "at_<n>", "of_<n>", "expert", "expert_mean")
    }  # by `mismatch.summarised`
    assert declared("train") == (made - critic) | {"grad_norm", "lr", "support_mismatch"} | balance | drafts
    assert declared("critic") == critic | {"loss", "grad_norm", "lr", "step_time"} | balance


def test_declared_speeds_are_measured() -> None:
    sources = (ROOT / "services" / "trainer" / "metrics_logger.py").read_text()
    measured = set(re.findall(r'"((?:step_time|wall_tok|actor_train|train_wait|wait_time|update_weights)\w*)"', sources))
    parts = {f"train_{part}_time" for part in STEP_PARTS}
    phases = {f"update_weights_{phase}_time" for phase in ("pause", "transfer", "check", "activate")}
    stats = empty_table(1)
    stats[:, batch_metrics.StatColumn.LATENCY :] = 1
    assert declared("perf") == measured | parts | phases | set(batch_metrics.engine_metrics(stats)), (
        "what the trainer stands still for is named by what that was"
    )


def test_named_rewards_are_declared() -> None:
    found = RewardParts().metrics({"<part>": RewardPart(samples=2, mean=0.5, std=0.5, min=0.0, max=1.0)})
    assert declared("rewards") == {name.replace("_part_", "<part>") for name in found}


def test_names_of_rewards_are_made_legal_and_bounded() -> None:
    parts, one = RewardParts(), RewardPart(samples=1, mean=1.0, std=0.0, min=1.0, max=1.0)
    assert set(parts.metrics({"is it short?\n": one})) == {f"is_it_short__/{what}" for what in ("mean", "std", "min", "max")}
    assert len(parts.metrics({str(number): one for number in range(100)})) == 4 * 63, "with the one before 64"
    assert len(parts.metrics({"5": one, "99": one})) == 4


def test_conversations_are_declared() -> None:
    stats = empty_table(2)
    stats[:, batch_metrics.StatColumn.ROUNDS] = 1
    assert declared("multi_turn") == set(batch_metrics.multi_turn(stats, 8))


def test_figures_of_evaluations_are_declared() -> None:
    rates, lengths = {"pass@2": 1.0, "pass^2": 1.0}, dict.fromkeys(("mean", "median", "min", "max", "p90", "p99"), 1.0)
    counted = {"samples": 2, "prompts": 1, "failed": 0, "oldest": 1, "newest": 1}
    figures = EvalFigures(dataset="<name>", version=1, live=1, mean_reward=1.0, rates=rates, lengths=lengths, **counted)
    assert declared("eval") == {re.sub("([@^])2", r"\1<k>", name) for name in evaluation_metrics(figures)}
