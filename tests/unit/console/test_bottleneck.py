"""Who waits for whom, what would help, and when that is not said; and what it says of five situations staged record by record."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shared.config.run_config import RunConfig
from shared.schema.ledger import GroupsScored
from shared.schema.service_messages import ServiceStatus
from shared.view.alarms import AlarmKind
from shared.view.bottleneck import Bottleneck, Workload, bottleneck
from shared.view.flow_history import FlowHistory
from shared.view.flow_view import flow_view
from shared.view.stall import Away, RunSituation, run_stall
from tests.support.tables import table
from tests.unit.console.test_flow_history import admitted, formed, scored, trained

QUEUED = {"queued": 0.5}


def with_rollout(config: RunConfig, **rollout: object) -> RunConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})


def found(config: RunConfig, waits: dict[str, float], count: int = 3, busy: float = 1.0, **given: Any) -> Bottleneck:
    alarmed = given.pop("alarmed", ())
    replicas = dict.fromkeys([f"rollout-{index}" for index in range(1, count + 1)], busy)
    return bottleneck(Workload(10, waits, list(replicas), replicas, **given), config, alarmed)


def test_full_replicas_need_company(run_config: RunConfig) -> None:
    said = found(with_rollout(run_config, max_staleness=2), {"generation": 0.3, "queue": 0.11, "scoring": 0.05}, **QUEUED)
    assert said.sentence == "The trainer waits 41 % of the time for rollout-1, rollout-2 and rollout-3."
    text = "add replicas, 3 at first (rollout.rollout_replicas): those that run are full, groups spend 50 % of their way in the queue"
    lending = "or have the trainer's GPUs generate while it waits: trainer.lend_gpus"
    assert [advice.text for advice in said.advice] == [text, lending], "more groups under way would only queue"
    colocated = run_config.model_copy(update={"trainer": run_config.trainer.model_copy(update={"colocate": True})})
    said_there = found(with_rollout(colocated, max_staleness=2), {"generation": 0.3, "queue": 0.11}, **QUEUED)
    assert [advice.text for advice in said_there.advice] == [text]
    assert (said.waiting, said.waiting_for) == ("trainer", "rollout-1, rollout-2 and rollout-3") and said.share == pytest.approx(0.41)
    assert not any(advice.withheld for advice in said.advice)


def test_where_cores_lack_replicas_are_not_the_advice(run_config: RunConfig) -> None:
    config, waits = with_rollout(run_config, max_staleness=2), {"generation": 0.3, "queue": 0.11}
    said = [advice.text for advice in found(config, waits, cores_awaited=0.75, **QUEUED).advice]
    assert said[0].startswith("more cores are what lacks: in 75 % of the last minute") and not any("replicas" in text for text in said)
    assert "add replicas" in found(config, waits, cores_awaited=0.4, **QUEUED).advice[0].text


def test_a_slow_group_needs_others_beside_it(run_config: RunConfig) -> None:
    said = found(with_rollout(run_config, max_staleness=2), {"generation": 0.41})
    assert said.advice[0].text.startswith("raise rollout.max_staleness (now 2)")
    assert not any("full" in advice.text for advice in said.advice)


@pytest.mark.parametrize("queued", [0.0, 0.5])
def test_a_synchronous_run_overlaps_first(run_config: RunConfig, queued: float) -> None:
    said = found(with_rollout(run_config, max_staleness=0), {"admission": 0.1, "generation": 0.5}, count=1, queued=queued)
    assert said.sentence == "The trainer waits 60 % of the time for rollout-1."
    assert [advice.text.partition(":")[0] for advice in said.advice] == ["raise rollout.max_staleness to 1"]


@table(
    ("cause", "awaited", "advice"),
    [
        ("scoring", "the reward services to score", "reward.reward_workers"),
        ("restarting", "its own restarts", "the Health page has its newest error"),
        ("saving", "its own checkpoints", "trainer.save_interval"),
        ("pushing", "pushes of weights to end", "weights.update_weights_interval"),
        ("handing out", "its batch to be formed and read", "look at the store"),
    ],
)
def test_each_cause_has_its_remedy(run_config: RunConfig, cause: str, awaited: str, advice: str) -> None:
    said = found(run_config, {cause: 0.3, "generation": 0.15})
    assert said.sentence == f"The trainer waits 30 % of the time for {awaited}, and 15 % for others."
    assert any(advice in item.text for item in said.advice)


def test_a_busy_trainer_has_replicas_wait(run_config: RunConfig) -> None:
    said = found(run_config, {"handing out": 0.03}, count=5, busy=0.4)
    assert (
        said.sentence == "The trainer trains 97 % of the time; rollout-1, rollout-2, rollout-3 and 2 more wait 60 % of it for the trainer."
    )
    assert said.waiting_for == "trainer" and any("3 replicas would do" in item.text for item in said.advice)
    alone = found(run_config, {}, count=1, busy=0.4)
    assert "rollout-1 waits 60 %" in alone.sentence and not any("would do" in item.text for item in alone.advice)


def test_nobody_waits(run_config: RunConfig) -> None:
    said = found(run_config, {"handing out": 0.04})
    assert "no service waits for another" in said.sentence and said.advice == () and said.waiting == ""


def test_advice_is_withheld_while_its_premise_is_alarmed(run_config: RunConfig) -> None:
    config = with_rollout(run_config, max_staleness=1)
    said = found(config, {"generation": 0.4}, alarmed={AlarmKind.LOGPROBS, AlarmKind.DISK})
    assert said.sentence.startswith("The trainer waits 40 %"), "what is seen is said all the same"
    assert said.advice[0].withheld == "first see to the alarm: engine and trainer differ"
    assert said.advice[1].withheld == "", "a smaller length limit does not presume that both agree"
    more = found(config, {"generation": 0.4}, alarmed={AlarmKind.MEMORY, AlarmKind.PUSH_GROWS}, **QUEUED)
    assert more.advice[0].withheld == "first see to the alarm: pushes take longer and longer and memory runs out"


def test_lost_tokens_are_said(run_config: RunConfig) -> None:
    said = found(with_rollout(run_config, staleness_policy="drop"), {}, lost_tokens=0.31)
    assert "31 % of the generated tokens are not trained" in said.advice[-1].text and "continue or mask" in said.advice[-1].text


def test_what_stands_still_comes_first(run_config: RunConfig) -> None:
    said = found(run_config, {"generation": 0.9}, blocked="room: buffer-0 holds back (the store is full)")
    assert said.sentence == "The run waits for room: buffer-0 holds back (the store is full)." and said.advice == ()


def test_two_steps_are_needed(run_config: RunConfig) -> None:
    assert "Too few steps" in bottleneck(Workload(1, {"generation": 1.0}, [], {}), run_config, ()).sentence


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
