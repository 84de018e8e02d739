"""Pushes: to whom, in which order, and what is told of them."""

import asyncio
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.trainer.step_scheduler import StepScheduler
from services.trainer.weights import pusher
from services.trainer.weights.push_schedule import (
    BACK_OFF_MOST,
    CHECK,
    COMMIT,
    RECEIVE,
    PushRecord,
    PushSchedule,
    Target,
    culprits_of,
    lost_members,
    replicas_without_rank,
)
from services.trainer.weights.stage_sender import relays_of, send_order
from shared.runtime.errors import MyxoError
from shared.schema.messages import Accepted
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import ReplicaPush, WeightsPushed, WeightsReceived, WeightsServed
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.valid_messages import example


def status(instance: str, version: int, incarnation: str = "a", state: str = "ready") -> ServiceStatus:
    return example(ServiceStatus, service="rollout", instance=instance, state=state, version=version, incarnation=incarnation)


ONE, TWO = Target("one", "a", 1), Target("two", "a", 1)


def test_whoever_serves_less_is_behind() -> None:
    statuses = [status("two", 3), status("one", -1), status("new", 5), status("busy", -1, state="catching up")]
    assert [target.instance for target in PushSchedule().behind(statuses, 4, now=0)] == ["one", "two"]


def test_a_commit_counts_before_the_card_says_so_and_only_for_that_life() -> None:
    schedule = PushSchedule()
    schedule.confirmed([ONE], 4, "d4")
    assert schedule.behind([status("one", 3)], 4, now=0) == ()
    assert schedule.behind([status("one", 3)], 5, now=0) == (ONE,)
    assert schedule.behind([status("one", -1, incarnation="b")], 4, now=0) == (Target("one", "b", 1),)
    schedule.forget(["one"])
    assert schedule.behind([status("one", 3)], 4, now=0) == (ONE,)


def test_colocated_engines_get_weights_again_after_a_turn_that_no_push_ended(tmp_path: Path) -> None:
    """They have lost what they had confirmed, though no version is newer: a batch was refused."""
    schedule, config = PushSchedule(), run_config(tmp_path)
    schedule.confirmed([ONE], 4, "d4")
    lags = partial(schedule.behind, [status("one", -1)], now=0)
    pushes: Any = SimpleNamespace(forget=schedule.forget, lags=lags, due=lags, awaited=None)
    colocation: Any = SimpleNamespace(colocated=True, lost=lambda: {"one"}, offload_engines=lambda: None, call_off=lambda: None)
    control: Any = SimpleNamespace(stopping=False)
    snapshots: Any = SimpleNamespace(tell_live=lambda: None, instead_of_pushes=False)
    assert StepScheduler(control, config, pushes, snapshots, colocation, None).next(4, 4) == (ONE,)


def test_who_fails_is_left_alone_longer_each_time() -> None:
    schedule, now, pauses = PushSchedule(), 100.0, []
    for _ in range(8):
        schedule.blame([ONE], now)
        pause = 0.0
        while not schedule.behind([status("one", 0)], 1, now + pause):
            pause += 0.5
        pauses.append(pause)
        now += pause
    assert pauses == sorted(pauses) and pauses[0] <= 1 and pauses[-1] == BACK_OFF_MOST
    schedule.blame([ONE], now)
    assert not schedule.behind([status("one", 0)], 1, now + 1.0)
    assert not schedule.behind([status("one", -1, incarnation="a.1")], 1, now)  # that it was fenced does not clear it
    assert schedule.behind([status("one", 0, incarnation="b")], 1, now)  # another life is not to blame
    schedule.confirmed([ONE], 1, "d1")
    schedule.blame([ONE], now)
    assert schedule.behind([status("one", 0)], 2, now + 1.0)  # the count has begun anew


@table(
    ("answered", "errors", "gone", "blamed"),
    [
        ((), {"one": "the channel broke"}, {}, {"two"}),  # who lives says so
        (("one",), {}, {}, {"two"}),
        ((), {"one": "out of memory", "two": "the channel broke"}, {}, {"one", "two"}),
        ((), {}, {"two": "its heartbeat has stopped"}, {"two"}),
    ],
)
def test_a_broken_channel_is_put_down_to_whoever_says_nothing(
    answered: tuple[str, ...], errors: dict[str, str], gone: dict[str, str], blamed: set[str]
) -> None:
    assert set(culprits_of([ONE, TWO], answered, errors, gone)) == blamed


def test_an_error_that_only_its_own_engine_can_have_caused_is_blamed_for_the_others_silence() -> None:
    assert culprits_of([ONE, TWO], (), {"one": "its scheduler does not run"}, {}, {"one": "its scheduler does not run"}) == {
        "one": "its scheduler does not run"
    }


def test_channels_are_made_anew_only_for_other_members() -> None:
    schedule = PushSchedule()
    assert schedule.next_push(1, [ONE, TWO], {}, skip_unchanged=True) is None
    first = schedule.next_push(1, [ONE, TWO], {"one": "", "two": ""}, skip_unchanged=True)
    assert first is not None and (first.number, first.engine_ranks, first.partial) == (2, {"": 2}, False)
    assert [schedule.first_ranks(target) for target in schedule.members] == [{"": 1}, {"": 2}]
    schedule.confirmed([ONE, TWO], 1, "d1")
    second = schedule.next_push(2, [ONE, TWO], {"one": "d1", "two": "d1"}, skip_unchanged=True)
    assert second is not None and (second.number, second.engine_ranks, second.partial) == (4, {}, True)
    schedule.failed([TWO], ["two"], now=0.0)
    third = schedule.next_push(3, [ONE], {"one": "another's"}, skip_unchanged=True)
    assert third is not None and (third.engine_ranks, third.partial) == ({"": 1}, False)


def test_each_machine_counts_its_own_engines_in_channels_of_its_own() -> None:
    schedule = PushSchedule()
    wide, across = Target("wide", "a", 2), Target("across", "a", 4)
    machines = {"one": ["A"], "two": ["B"], "wide": ["B"], "across": ["B", "C"]}
    push = schedule.next_push(1, [ONE, TWO, wide, across], dict.fromkeys(machines, ""), skip_unchanged=False, machines=machines)
    assert push is not None and push.engine_ranks == {"A": 1, "B": 5, "C": 2}
    assert [schedule.first_ranks(target) for target in schedule.members] == [{"A": 1}, {"B": 1}, {"B": 2}, {"B": 4, "C": 1}]


def test_an_engine_without_a_rank_of_the_trainer_on_its_machine_is_told_so() -> None:
    assert replicas_without_rank({"one": ["A"], "two": ["C"], "across": ["A", "B"]}, ["A", "B"]).keys() == {"two"}
    assert "(C; ranks are on A, B)" in replicas_without_rank({"two": ["A", "C"]}, ["A", "B"])["two"]
    assert replicas_without_rank({"two": ["C"]}, []) == {}, "where machines have no channels of their own, all will do"


@table(
    ("machines", "sources", "engines", "relays"),
    [
        ("AABB", {0: 0}, {"A": 1, "B": 1}, {0: [2]}),
        ("AABB", {0: 0, 1: 2}, {"A": 1, "B": 1}, {0: [3], 1: [1]}),  # pipeline stages over machines: ranks that are free relay
        ("AB", {0: 0, 1: 1}, {"A": 1, "B": 1}, {0: [1], 1: [0]}),  # none is free
        ("AABB", {0: 0, 1: 2}, {"B": 1}, {0: [3], 1: []}),  # no engine on A
        ("AABBCC", {0: 0, 1: 1}, {"A": 2, "B": 1, "C": 1}, {0: [2, 4], 1: [3, 5]}),
    ],
)
def test_every_machine_with_engines_has_a_relay_for_each_stage_of_another(
    machines: str, sources: dict[int, int], engines: dict[str, int], relays: dict[int, list[int]]
) -> None:
    assert relays_of(list(machines), sources, engines) == relays


def test_a_member_is_gone_when_its_status_or_its_weights_are() -> None:
    assert lost_members([ONE], [status("one", 3)]) == {}
    assert "heartbeat" in lost_members([ONE], [])["one"]
    assert "lost its weights" in lost_members([ONE], [status("one", -1, incarnation="b")])["one"]


@pytest.mark.parametrize("error", [MyxoError("busy"), KeyError("busy")], ids=["refused", "broken"])
@pytest.mark.parametrize(("verb", "awaited"), [("offer", True), ("receive", False), ("commit", True)])
def test_one_that_fails_cuts_short_only_those_that_share_a_channel_with_it(
    verb: str, awaited: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(pusher, "POLL_INTERVAL_S", 0.02)

    async def request(subject: str, *_: Any, **__: Any) -> Accepted:
        if subject == "one":
            raise error
        await asyncio.sleep(0.6)
        return Accepted()

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    link: Any = SimpleNamespace(
        begin=lambda work: asyncio.run_coroutine_threadsafe(work, loop),
        replicas=[status("one", 0), status("two", 0)],
        service=SimpleNamespace(subjects=SimpleNamespace(replica_weights=lambda name, _: name), bus=SimpleNamespace(request=request)),
    )
    asked: Any = pusher.PushRequest(link, [ONE, TWO], verb, lambda _: Accepted(), Accepted, 30.0)
    with pytest.raises(pusher.PeerFailure, match="one: .*busy"):
        asked.wait()
    assert (set(asked.answers), set(asked.errors)) == ({"two"} if awaited else set(), {"one"})
    loop.call_soon_threadsafe(loop.stop)


# --- what a push's event says of its steps and of every replica, however it ends


def received(seconds: float, **marks: float) -> WeightsReceived:
    return WeightsReceived(digest="", bytes=10, seconds=seconds, marks=marks)


def test_a_push_that_one_of_two_does_not_confirm() -> None:
    record = PushRecord(3, ["one", "two"], {"three": "a step of an earlier push is still in progress"}, 100.0)
    record.begin(RECEIVE, 101.5)
    record.received = {"one": received(0.5, asked=7.0, paused=7.25), "two": received(0.75)}
    record.begin(CHECK, 103.25)
    record.begin(COMMIT, 103.5)
    record.failed({"two": "its heartbeat has stopped"})
    record.served = {"one": WeightsServed(paused=2.25, marks={"commit_asked": 9.0, "resumed": 9.125})}
    event = record.event(104.0, 7.0, stall=0.25, sent=20)
    assert event == WeightsPushed(
        version=3,
        replicas=[
            ReplicaPush(replica="one", paused=2.25, pausing=0.25, loading=0.5, activating=0.125),
            ReplicaPush(replica="two", loading=0.75, failure="commit: its heartbeat has stopped"),
            ReplicaPush(replica="three", failure="offer: a step of an earlier push is still in progress"),
        ],
        **{"joining": 1.5, "transfer": 1.75, "check": 0.25, "activation": 0.5, "seconds": 4.0, "stall": 0.25, "bytes": 20, "at": 7.0},
    )
    assert record.marks({"sent": 102.0}) == {
        "trainer": {"prepare_began": 100.0, "receive_began": 101.5, "check_began": 103.25, "commit_began": 103.5, "sent": 102.0},
        "one": {"asked": 7.0, "paused": 7.25, "commit_asked": 9.0, "resumed": 9.125},
    }
    assert WeightsPushed.decode(event.encode()) == event


def test_a_push_that_breaks_names_the_culprit_and_those_who_go_without() -> None:
    record = PushRecord(3, ["one", "two"], {}, 100.0)
    record.begin(RECEIVE, 100.0)
    record.failed({"two": "it did not answer"})
    event = record.event(105.0, 7.0, failure="the channel broke")
    assert {part.replica: part.failure for part in event.replicas} == {
        "one": "receive: the push failed for others",
        "two": "receive: it did not answer",
    }
    assert (event.joining, event.transfer, event.activation, event.seconds) == (0.0, 5.0, 0.0, 5.0)


@pytest.mark.parametrize("checked", [False, True])
def test_a_second_transfer_to_compare_counts_for_the_check(checked: bool) -> None:
    record = PushRecord(1, ["one"], {}, 0.0)
    record.begin(RECEIVE, 1.0)
    record.begin(CHECK, 3.0)
    if checked:
        record.begin(CHECK, 4.0)
    record.begin(COMMIT, 8.0)
    event = record.event(9.0, 7.0)
    assert (event.transfer, event.check, event.activation) == (2.0, 5.0, 1.0)


def test_offers_that_all_decline() -> None:
    event = PushRecord(2, (), {"one": "busy"}, 5.0).event(5.0, 7.0, failure="every replica declined the offer")
    assert event.replicas == [ReplicaPush(replica="one", failure="offer: busy")] and event.seconds == 0


# --- the order in which a stage's units travel


def test_large_units_travel_in_the_middle() -> None:
    assert send_order(["embedding", "a", "b", "c", "d"], [900, 10, 20, 25, 25], 100) == ["a", "b", "embedding", "c", "d"]
    assert send_order(["x", "y"], [900, 800], 100) == ["x", "y"] and send_order([], [], 100) == []
