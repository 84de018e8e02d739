"""What a push's event says of its steps and of every replica, however it ends."""

import pytest

from services.trainer.weights.push_schedule import CHECK, COMMIT, RECEIVE, PushRecord
from shared.schema.weight_messages import ReplicaPush, WeightsPushed, WeightsReceived, WeightsServed


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
