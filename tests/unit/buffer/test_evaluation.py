"""Evaluations of several sets: their figures, their deadline, and what may end a run."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.evaluation_logger import EvaluationLogger
from services.buffer.state import BufferState
from shared.data import pass_rates
from shared.schema.ledger import EvalEnded, EvalScored, EvalStarted, RunFinished
from shared.schema.messages import EvaluationsRequest, Scored
from tests.support.buffer_config import buffer_config
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.unit.buffer.decisions import fold, meta, of_samples

SETS = {"sums": 2, "words": 1}
LIMITS = buffer_config(steps=4, groups=2, samples=2, max_staleness=1, interval=1, eval_prompts=SETS, eval_interval=2, eval_timeout=100)


def scored(group: str, rewards: list[float], lengths: list[int], *, full: int = 100, versions: tuple[int, int] = (0, 0)) -> Scored:
    """A held-out prompt that came back; responses of ``full`` tokens ended at their length."""
    samples = [meta(*versions, length, "length" if length == full else "stop") for length in lengths]
    return of_samples(Scored, group, samples, group, rewards=rewards)


def started(limits: BufferConfig = LIMITS, at: float = 0.0) -> BufferState:
    state = BufferState()
    fold(state, policy.live(state, limits, 0, at))
    return state


def test_each_set_of_a_due_version_is_an_evaluation_of_its_own() -> None:
    state, begun = BufferState(), []
    for version in range(5):
        begun += [record for record in fold(state, policy.live(state, LIMITS, version, 0.0)) if isinstance(record, EvalStarted)]
    assert [(record.version, record.dataset, record.prompts) for record in begun] == [
        (version, name, prompts) for version in (0, 2, 4) for name, prompts in SETS.items()
    ]


FOURTH = buffer_config(steps=20, groups=2, samples=2, max_staleness=1, interval=1, eval_prompts=SETS, eval_interval=4)


def begun(limits: BufferConfig, versions: Sequence[int], state: BufferState | None = None) -> list[tuple[int, tuple[int, ...]]]:
    """The evaluations of the set of words that begin as versions go live one after the other, each announced twice: (version, skipped)."""
    state, found = state or BufferState(), list[tuple[int, tuple[int, ...]]]()
    for version in versions:
        for _ in range(2):
            for record in fold(state, policy.live(state, limits, version, 0.0)):
                if isinstance(record, EvalStarted) and record.dataset == "words":
                    found.append((record.version, record.skipped))
    return found


def test_a_version_that_was_due_and_never_went_live_is_evaluated_as_the_next() -> None:
    assert begun(FOURTH, [0, 3, 7, 9, 11, 12, 20]) == [(0, ()), (7, (4,)), (9, (8,)), (12, ()), (20, (16,))]
    assert begun(FOURTH, [0, 4, 5, 8]) == [(0, ()), (4, ()), (8, ())], "nothing was skipped"
    assert begun(FOURTH, [0, 4, 17, 18]) == [(0, ()), (4, ()), (17, (8, 12, 16))], "one evaluation for several"
    assert begun(FOURTH, [2, 3]) == [(2, (0,))], "nor is the first one lost"


def test_steps_that_no_version_ends_at_are_evaluated_with_the_next() -> None:
    limits = buffer_config(steps=20, groups=2, samples=2, max_staleness=1, interval=3, eval_prompts=SETS, eval_interval=4)
    assert begun(limits, range(8)) == [(version, ()) for version in (0, 2, 3, 4, 6, 7)], "6 steps for 4, 9 for 8, 12, 18 for 16, the end"


@table("records", [1, 2, 3])
@table("then", [9, 10, 12])
def test_an_evaluation_for_a_skipped_version_survives_the_death_of_the_buffer_and_is_made_once(records: int, then: int) -> None:
    state = BufferState()
    begun(FOURTH, [0, 4, 7], state)
    fold(state, policy.live(state, FOURTH, 9, 0.0)[:records])  # the ledger of a buffer that died among its records
    begun(FOURTH, [then], state)
    sets = [(name, [version for version, of in state.evaluations if of == name and version > 4]) for name in SETS]
    expected = {name: [9] if index + 1 < records or then == 9 else [then] for index, name in enumerate(SETS)}
    for name, found in sets:
        assert found == expected[name] + ([12] if then == 12 and expected[name] == [9] else []), name


def test_a_due_version_is_evaluated_though_the_one_before_it_is_not_done() -> None:
    state = BufferState()
    begun(FOURTH, [0, 7, 9, 12], state)
    assert [version for version, name in state.evaluations if name == "sums"] == [0, 7, 9, 12]


def test_an_empty_response_is_of_no_version() -> None:
    state, came = started(), scored("eval.words.0.0", [0.0, 1.0], [0, 4], versions=(3, 3))
    came.samples[0] = replace(came.samples[0], oldest=0, newest=0)
    [record] = policy.scored(state, LIMITS, [came], 1.0)
    assert isinstance(record, EvalScored) and (record.oldest, record.newest) == (3, 3)


def test_figures_are_those_of_the_samples_that_came_back() -> None:
    state = started()
    fold(state, policy.scored(state, LIMITS, [scored("eval.sums.0.0", [1.0, 0.0, 1.0, 0.0], [10, 20, 100, 30])], 1.0))
    fold(state, policy.live(state, LIMITS, 1, 2.0))
    fold(state, policy.scored(state, LIMITS, [scored("eval.sums.0.1", [0.0, 0.0, 0.5, 1.5], [40, 100, 50, 60], versions=(0, 1))], 3.0))
    [ended] = fold(state, policy.close(state, LIMITS, 4.0))
    assert isinstance(ended, EvalEnded)
    assert (ended.dataset, ended.version, ended.oldest, ended.newest, ended.live, ended.lag) == ("sums", 0, 0, 1, 1, 1)
    assert (ended.prompts, ended.failed, ended.late, ended.samples, ended.mean_reward) == (2, 0, 0, 8, 0.5)
    assert ended.lengths == pytest.approx({"mean": 51.25, "min": 10, "median": 45, "p90": 100, "p99": 100, "max": 100})
    assert (ended.truncated, ended.seconds) == (2 / 8, 4.0)
    assert ended.rates == pytest.approx(
        {
            "pass@1": (2 / 4 + 1 / 4) / 2,
            "pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,
            "pass@4": 1.0,
            "pass^1": (2 / 4 + 1 / 4) / 2,
            "pass^2": (1 / 6 + 0) / 2,
            "pass^4": 0.0,
        }
    )
    assert list(state.evaluations) == [(0, "words")]


def test_a_rollout_of_several_conversations_counts_once() -> None:
    state = started()
    nine = scored("eval.sums.0.1", [0.0] * 8 + [1.0], [100] * 9).model_copy(update={"rollouts": (0,) * 8 + (1,)})
    fold(state, policy.scored(state, LIMITS, [scored("eval.sums.0.0", [1.0, 1.0], [10, 20]), nine], 1.0))
    [ended] = (record for record in fold(state, policy.close(state, LIMITS, 4.0)) if isinstance(record, EvalEnded))
    assert (ended.samples, ended.mean_reward, ended.truncated, ended.lengths["max"]) == (4, 0.75, 0.5, 100)
    assert ended.rates == pytest.approx({"pass@1": 0.75, "pass@2": 1.0, "pass^1": 0.75, "pass^2": 0.5})


@table("passing", range(6))
def test_pass_rates_are_means_over_all_choices_of_k_samples(passing: int) -> None:
    rewards = [1.0] * passing + [0.2] * (5 - passing)
    counts = pass_rates.pass_counts([rewards], 1.0)
    assert pass_rates.powers(counts) == [1, 2, 4]
    for k in (1, 2, 3, 4, 5):
        chosen = [[reward == 1 for reward in some] for some in combinations(rewards, k)]
        assert pass_rates.pass_at(counts, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
        assert pass_rates.pass_all(counts, k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


def test_a_late_evaluation_ends_at_its_deadline_with_what_it_has() -> None:
    state = started(at=1000.0)
    fold(state, policy.scored(state, LIMITS, [scored("eval.sums.0.1", [1.0], [7])], 1050.0))
    assert not policy.is_late(state, LIMITS, 1099.9) and policy.close(state, LIMITS, 1099.9) == []
    assert policy.is_late(state, LIMITS, 1100.0)
    sums, words = fold(state, policy.close(state, LIMITS, 1100.0))
    assert isinstance(sums, EvalEnded) and isinstance(words, EvalEnded)
    assert (sums.prompts, sums.late, sums.samples, sums.mean_reward) == (2, 1, 1, 1.0)
    assert (words.late, words.samples, words.mean_reward, words.rates, words.lengths) == (1, 0, 0.0, {}, {})
    assert (words.oldest, words.newest) == (0, 0)
    assert policy.scored(state, LIMITS, [scored("eval.sums.0.0", [1.0], [7])], 1101.0) == []  # it comes too late


def test_the_time_of_an_evaluation_does_not_run_while_the_run_stands_still() -> None:
    state, resumed = started(at=1000.0), replace(LIMITS, active_since=5000.0)
    assert not policy.is_late(state, resumed, 5099.0)
    assert policy.is_late(state, resumed, 5100.0)


def test_the_run_ends_once_every_set_of_the_last_version_has_ended() -> None:
    limits = buffer_config(steps=0, groups=2, samples=2, max_staleness=1, interval=1, eval_prompts=SETS, eval_first=False)
    state = BufferState()
    assert policy.close(state, limits, 0.0) == [], "nothing was evaluated yet"
    fold(state, policy.live(state, limits, 0, 0.0))
    assert policy.admit(state, limits, 0.0) == []
    fold(state, policy.scored(state, limits, [scored("eval.words.0.0", [1.0], [7])], 1.0))
    [words] = fold(state, policy.close(state, limits, 1.0))
    assert isinstance(words, EvalEnded) and policy.close(state, limits, 1.0) == []
    fold(state, policy.scored(state, limits, [scored(f"eval.sums.0.{row}", [1.0], [7]) for row in (0, 1)], 1.0))
    fold(state, policy.close(state, limits, 1.0))
    [finished] = fold(state, policy.close(state, limits, 1.0))
    assert isinstance(finished, RunFinished) and finished.steps == 0
    assert policy.close(state, limits, 1.0) == []


def test_an_answer_has_as_many_evaluations_as_a_message_holds(tmp_path: Path) -> None:
    """A user's evaluation function may give each 64 metrics with long names: 256 of them were over the bus's limit."""
    limit, metrics = 1 << 20, {f"{number:064}": 0.5 for number in range(64)}
    facts = {
        "oldest": 0,
        "newest": 0,
        "live": 0,
        "prompts": 1,
        "failed": 0,
        "samples": 1,
        "mean_reward": 0.5,
        "metrics": metrics,
        "at": 0.0,
    }
    ended = {version: EvalEnded(dataset="heldout", version=version, **facts) for version in range(600)}
    service: Any = SimpleNamespace(config=run_config(tmp_path), bus=SimpleNamespace(message_limit=limit))
    logger, known = EvaluationLogger(service, lambda _: None, AsyncMock()), list[int]()
    while len(known) < len(ended):
        answer = logger.after(EvaluationsRequest(known=len(known)), ended)
        assert answer.evaluations and len(answer.encode()) <= limit + 100  # the bus leaves room for the envelope
        known += [figures.version for figures in answer.evaluations]
    assert known == list(range(600))
