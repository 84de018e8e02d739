"""What the page *Weights* is answered: who has which version, how it got there, and what failed by name."""

from services.console.pages.weights import pace, version_rows, weight_events, weights_now
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.schema.weight_messages import ReplicaPush, WeightsLive, WeightsPushed
from shared.view.metric_history import MOST, PushHistory


def status(instance: str, version: int, service: str = "rollout", state: str = "ready") -> ServiceStatus:
    return ServiceStatus(service=service, instance=instance, host="h", pid=1, http="", state=state, version=version, at=0.0)


def pushed(version: int, at: float, replicas: list[ReplicaPush], failure: str = "", **figures: float) -> WeightsPushed:
    return WeightsPushed.model_validate({"version": version, "at": at, "replicas": replicas, "failure": failure, **figures})


def told() -> PushHistory:
    """Version 1 came at the second try, and to one of two; 2 failed; 3 was read from disk."""
    history = PushHistory()
    history.push(pushed(1, 10.0, [ReplicaPush(replica="a", failure="receive: cut off")], failure="cut off"))
    figures = {"joining": 1.0, "transfer": 2.0, "activation": 0.5, "seconds": 3.5, "stall": 0.25, "bytes": 4_000_000_000}
    figures["check"] = 0.25
    parts = [
        ReplicaPush(replica="a", paused=2.5, pausing=0.125, loading=1.5, activating=0.0625),
        ReplicaPush(replica="b", loading=1.75, failure="commit: late"),
    ]
    history.push(pushed(1, 20.0, parts, **figures))
    history.live(WeightsLive(version=1, replicas=["a"], seconds=3.5, bytes=4_000_000_000, at=20.0))
    history.push(pushed(2, 30.0, [ReplicaPush(replica="b", failure="offer: busy")], failure="every replica declined the offer"))
    history.live(WeightsLive(version=3, replicas=["a", "b"], seconds=7.0, bytes=10, at=40.0))
    history.take(ServiceEvent(service="rollout", instance="b", what="caught_up", detail="version 1 from a in 1.0 s", at=25.0))
    history.take(ServiceEvent(service="rollout", instance="b", what="fenced", detail="x", at=21.0))
    assert not history.take(ServiceEvent(service="rollout", instance="b", what="joined", at=1.0))
    return history


def test_versions_newest_first_with_who_has_them() -> None:
    found = version_rows(told(), [status("a", 3), status("b", 1), status("trainer-0", 4, "trainer")], lambda version: 2 * version)
    three, two, one = found.versions
    assert (three.version, three.step, three.served, three.seconds, three.transfer, three.at) == (3, 6, True, 7.0, None, 40.0)
    assert [(part.replica, part.now) for part in three.replicas] == [("a", True), ("b", False)]
    assert not two.served and two.failure == "every replica declined the offer" and two.seconds is None and two.at == 30.0
    assert one.served and one.attempts == 2 and one.at == 20.0 and one.failure == "cut off"
    assert (one.joining, one.pausing, one.transfer, one.check, one.activation) == (1.0, 0.125, 2.0, 0.25, 0.5)
    assert (one.seconds, one.stall) == (3.5, 0.25)
    assert (one.replicas[0].activating, one.replicas[1].activating) == (0.0625, None)
    assert one.paused == 2.5 and one.gb_per_s == 2.0
    assert [(part.replica, part.now, part.failure) for part in one.replicas] == [("a", False, ""), ("b", True, "commit: late")]


def test_a_version_whose_push_failed_and_that_a_replica_has_all_the_same() -> None:
    (row,) = version_rows(told(), [status("b", 2)], int, below=3, limit=1).versions
    assert row.served and row.failure and [(part.replica, part.now) for part in row.replicas] == [("b", True)]


def test_versions_come_in_pages() -> None:
    history = PushHistory()
    for version in range(5):
        history.push(pushed(version, version, [ReplicaPush(replica="a")]))
    first = version_rows(history, [], int, None, 2)
    assert [row.version for row in first.versions] == [4, 3] and first.next == 3 and first.total == 5
    second = version_rows(history, [], int, first.next, 3)
    assert [row.version for row in second.versions] == [2, 1, 0] and second.next is None
    assert version_rows(PushHistory(), [], int).versions == []


def test_who_serves_what_now() -> None:
    now = weights_now([status("b", -1, state="fenced"), status("a", 3), status("trainer-0", 4, "trainer")], told())
    assert (now.live, now.trained) == (3, 4)
    assert [(part.replica, part.version, part.behind, part.state) for part in now.replicas] == [
        ("a", 3, 0, "ready"),
        ("b", -1, 4, "fenced"),
    ]
    repaired = weights_now([status("a", 0), status("trainer-0", 0, "trainer")], told())
    assert (repaired.live, repaired.trained, repaired.replicas[0].behind) == (0, 0, 0), "the cut versions are past"
    nothing = weights_now([], PushHistory())
    assert (nothing.live, nothing.trained, nothing.replicas) == (-1, -1, [])


def test_pace_is_of_the_pushes_that_came_through() -> None:
    found = pace(told())
    assert found.versions == [1]
    assert {series.name: series.values for series in found.series} == {
        "transfer": [2.0],
        "joining": [1.0],
        "pausing": [0.125],
        "check": [0.25],
        "activation": [0.5],
        "longest pause": [2.5],
        "stall of the trainer": [0.25],
        "speed": [2.0],
    }


def test_failures_have_names_and_the_newest_come_first() -> None:
    found = weight_events(told(), 3)
    assert [(event.at, event.who, event.what, event.bad) for event in found.events] == [
        (30.0, "b", "push of version 2 failed", True),
        (25.0, "b", "caught up", False),
        (21.0, "b", "fenced", True),
    ]
    assert found.left_out == 2


def test_what_is_kept_is_bounded() -> None:
    history = PushHistory()
    for version in range(MOST + 5):
        history.live(WeightsLive(version=version, replicas=[], seconds=0.0, bytes=0, at=1.0))
    assert len(history.versions) == MOST and min(history.versions) == 5
