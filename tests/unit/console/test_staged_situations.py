"""The sentence of who waits for whom in five situations that are staged record by record: whom it names, and what it advises."""

from collections.abc import Mapping, Sequence

import pytest

from shared.config.run_config import RunConfig
from shared.schema.ledger import GroupsScored
from shared.schema.service_messages import ServiceStatus
from shared.view.bottleneck import Bottleneck
from shared.view.flow_history import FlowHistory
from shared.view.flow_view import flow_view
from shared.view.stall import Away, RunSituation, run_stall
from tests.unit.console.test_flow_history import admitted, formed, scored, trained

STEPS = 8


def staged(period: float, train: float, ways: Mapping[str, tuple[float, float, float, float]]) -> FlowHistory:
    """Steps that begin every ``period`` seconds and last ``train`` of them. Each has one group of each replica in ``ways``, whose times are
    seconds before the step's begin: its admission, the begin and end of its generation, its score."""
    history, group = FlowHistory(), 0
    for step in range(STEPS):
        begin, numbers, records = 1000 + period * step, [], []
        for replica, (admission, started, ended, score) in ways.items():
            records.append((begin - admission, admitted(group, 1, begin - admission)))
            found = scored(group, begin - started, begin - ended, replica)
            records.append((begin - score, GroupsScored(groups=[found], at=begin - score)))
            numbers.append(group)
            group += 1
        for _, record in sorted(records, key=lambda entry: entry[0]):
            history.apply(record)
        history.apply(formed(step, numbers, begin - 0.1))
        history.apply(trained(step, begin, begin + train))
    return history


def said(history: FlowHistory, config: RunConfig, bound: int, away: Mapping[str, str] | None = None, *, live: bool = True) -> Bottleneck:
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_staleness": bound})})
    there, now = statuses() if live else [], history.newest
    gone = {name: Away(now - 12, why) for name, why in (away or {}).items()}
    wait = run_stall(RunSituation.of(config, there, away=gone)) if away else None
    return flow_view(history, config, there, now, 3600, (), wait).bottleneck


def statuses() -> Sequence[ServiceStatus]:
    kinds = ("buffer", "rollout", "reward", "trainer")
    common = {"incarnation": "1", "host": "h", "pid": 1, "at": 0.0, "state": "ready", "http": ""}
    return [ServiceStatus(service=kind, instance=f"{kind}-0", version=1, **common) for kind in kinds]


def test_a_slow_trainer(run_config: RunConfig) -> None:
    """Groups lie ready for long; replicas generate a fifth of the time, since the bound lets them go no further ahead."""
    ways = {f"rollout-{index}": (25.0, 25.0, 21.0, 20.5) for index in range(3)}
    found = said(staged(20, 19.8, ways), run_config, bound=1)
    assert "The trainer trains" in found.sentence and "wait 8" in found.sentence and found.waiting_for == "trainer"
    assert not any("add replicas" in advice.text or "max_staleness" in advice.text for advice in found.advice)
    for words in ("trainer more ranks", "1 replica would do"):
        assert any(words in advice.text for advice in found.advice), words


def test_a_slow_reward_environment(run_config: RunConfig) -> None:
    found = said(staged(20, 6, {"rollout-0": (22.0, 21.0, 13.0, 0.5)}), run_config, bound=1)
    assert found.sentence.startswith("The trainer waits 6") and found.waiting_for == "the reward services to score"
    assert ["reward.reward_workers" in advice.text for advice in found.advice] == [True]


def test_one_slow_replica(run_config: RunConfig) -> None:
    """Three are done early; each step waits for the fourth, which alone is named. More of its like, or more staleness, are no remedy."""
    ways = {f"rollout-{index}": (21.0, 20.0, 17.0, 16.5) for index in range(3)} | {"rollout-3": (21.0, 20.0, 0.6, 0.4)}
    found = said(staged(20, 8, ways), run_config, bound=2)
    assert found.waiting_for == "rollout-3" and "for rollout-3" in found.sentence
    [advice] = found.advice
    assert "see what holds rollout-3 back" in advice.text and "6.5 times as long" in advice.text


@pytest.mark.parametrize(("bound", "words"), [(0, "raise rollout.max_staleness to 1"), (1, "raise rollout.max_staleness (now 1)")])
def test_a_bound_that_is_too_tight(run_config: RunConfig, bound: int, words: str) -> None:
    """Groups begin when the step before has ended, so that trainer and replicas take turns: both are idle half of the time."""
    ways = {f"rollout-{index}": (10.0, 9.9, 0.5, 0.3) for index in range(2)}
    found = said(staged(20, 10, ways), run_config, bound=bound)
    assert (
        found.sentence.startswith("The trainer waits 4") and found.waiting_for == "rollout-0 and rollout-1"
    ) or "rollout-" in found.waiting_for
    assert found.advice[0].text.startswith(words)
    assert not any("add replicas" in advice.text for advice in found.advice), "those that are there lack groups"


def test_nats_is_down(run_config: RunConfig) -> None:
    """Nothing is known of services then, which is not the same as that none is there."""
    history = staged(20, 10, {"rollout-0": (10.0, 9.9, 0.5, 0.3)})
    found = said(history, run_config, 1, {"NATS": "connection refused"}, live=False)
    assert found.sentence.startswith("The run waits for NATS, which is away: connection refused, for 12s; every ") and found.advice == ()
    both = said(history, run_config, 1, {"Redis": "no answer within 5 s", "NATS": "connection refused", "trainer-0": "silent"})
    assert "NATS, which is away: connection refused; and for Redis, which is away: no answer within 5 s, for 12s" in both.sentence
    assert "NATS" not in said(history, run_config, 1, {"trainer-0": "silent"}).sentence
