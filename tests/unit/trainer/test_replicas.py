"""Whom a push goes to, and whom a broken one is put down to."""

from __future__ import annotations

import pytest

from services.trainer.weights.replicas import BACK_OFF_MOST, Replicas, Target, guilty, is_gone
from shared.schema.messages import ServiceStatus


def card(instance: str, version: int, incarnation: str = "a", state: str = "ready") -> ServiceStatus:
    return ServiceStatus(
        service="rollout", instance=instance, host="h", pid=1, http="", state=state, version=version, incarnation=incarnation, at=0.0
    )


ONE, TWO = Target("one", "a", 1), Target("two", "a", 1)


def test_whoever_serves_less_is_behind() -> None:
    cards = [card("two", 3), card("one", -1), card("new", 5), card("busy", -1, state="catching up")]
    assert [target.instance for target in Replicas().behind(cards, 4, now=0)] == ["one", "two"]


def test_a_commit_counts_before_the_card_says_so_and_only_for_that_life() -> None:
    replicas = Replicas()
    replicas.confirmed([ONE], 4)
    assert replicas.behind([card("one", 3)], 4, now=0) == ()
    assert replicas.behind([card("one", 3)], 5, now=0) == (ONE,)
    assert replicas.behind([card("one", -1, incarnation="b")], 4, now=0) == (Target("one", "b", 1),)
    replicas.forget(["one"])
    assert replicas.behind([card("one", 3)], 4, now=0) == (ONE,)


def test_who_fails_is_left_alone_longer_each_time() -> None:
    replicas, now, pauses = Replicas(), 100.0, []
    for _ in range(8):
        replicas.blame([ONE], now)
        pause = 0.0
        while not replicas.behind([card("one", 0)], 1, now + pause):
            pause += 0.5
        pauses.append(pause)
        now += pause
    assert pauses == sorted(pauses) and pauses[0] <= 1 and pauses[-1] == BACK_OFF_MOST
    replicas.blame([ONE], now)
    assert not replicas.behind([card("one", 0)], 1, now + 1.0)
    assert not replicas.behind([card("one", -1, incarnation="a.1")], 1, now)  # that it was fenced does not clear it
    assert replicas.behind([card("one", 0, incarnation="b")], 1, now)  # another life is not to blame
    replicas.confirmed([ONE], 1)
    replicas.blame([ONE], now)
    assert replicas.behind([card("one", 0)], 2, now + 1.0)  # the count has begun anew


@pytest.mark.parametrize(
    ("answers", "failures", "blamed"),
    [
        ({"one": "the lane broke", "two": None}, {}, {"two"}),  # who lives says so
        ({"one": "the lane broke"}, {}, {"two"}),
        ({"one": "out of memory", "two": "the lane broke"}, {}, {"one", "two"}),
        ({"one": None, "two": None}, {"two": "its heartbeat has stopped"}, {"two"}),
    ],
)
def test_a_broken_lane_is_put_down_to_whoever_says_nothing(
    answers: dict[str, str | None], failures: dict[str, str], blamed: set[str]
) -> None:
    assert set(guilty([ONE, TWO], answers, failures)) == blamed


def test_a_member_is_gone_when_its_card_or_its_weights_are() -> None:
    assert is_gone(ONE, {"one": card("one", 3)}) is None
    assert "heartbeat" in str(is_gone(ONE, {}))
    assert "lost its weights" in str(is_gone(ONE, {"one": card("one", -1, incarnation="b")}))
