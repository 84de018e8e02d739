"""Evaluations of several sets: their figures, their deadline, and what may end a run."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState
from shared.data import pass_rates
from shared.schema.ledger import EvalEnded, EvalStarted, LedgerRecord, RunFinished
from shared.schema.messages import Payload, SampleMeta, Scored
from tests.support.buffer_config import buffer_config

SETS = {"sums": 2, "words": 1}
LIMITS = buffer_config(steps=4, groups=2, samples=2, max_staleness=1, interval=1, eval_prompts=SETS, eval_interval=2, eval_timeout=100)


def fold(state: BufferState, records: Sequence[LedgerRecord]) -> list[LedgerRecord]:
    for record in records:
        state.apply(record)
    return list(records)


def scored(group: str, rewards: list[float], lengths: list[int], *, full: int = 100, versions: tuple[int, int] = (0, 0)) -> Scored:
    """A held-out prompt that came back; responses of ``full`` tokens ended at their length."""
    oldest, newest = versions
    return Scored(
        group=group,
        attempt=0,
        payload=Payload(keys=[group], bytes=1),
        samples=[
            SampleMeta(tokens=length, oldest=oldest, newest=newest, finish="length" if length == full else "stop") for length in lengths
        ],
        rewards=rewards,
        replica="r",
        environment="math",
        started=0.0,
        ended=1.0,
    )


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


@pytest.mark.parametrize("passing", range(6))
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
