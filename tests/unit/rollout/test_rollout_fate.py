"""When a rollout is tried again, when alone, when it is lost, and when its group is."""

import pytest

from services.rollout.rollout_fate import DISRUPTIVE_TRIES, TRIES, GroupLosses, RolloutFailures
from shared.hooks import HookFailed
from shared.runtime.errors import DeadlineExceeded

RAISED = HookFailed("field", "a:b", "ValueError: no")
BLOCKED = HookFailed("field", "a:b", "it held up its process", disruptive=True)


def test_a_rollout_is_lost_after_so_many_failures_in_a_row() -> None:
    failures = RolloutFailures()
    for _ in range(TRIES - 1):
        failures.note(RAISED, counts=True)
    assert not failures.alone
    with pytest.raises(HookFailed, match=rf"ValueError: no; it failed {TRIES} times in a row"):
        failures.note(RAISED, counts=True)


def test_what_may_not_be_its_fault_does_not_count() -> None:
    failures = RolloutFailures()
    for _ in range(3 * TRIES):
        failures.note(RAISED, counts=False)
    assert failures.count == 0


def test_what_cost_others_their_process_is_tried_alone_and_less_often() -> None:
    failures = RolloutFailures()
    failures.note(RAISED, counts=True)
    for _ in range(DISRUPTIVE_TRIES - 1):
        failures.note(BLOCKED, counts=True)
        assert failures.alone
    failures.note(RAISED, counts=True)
    assert failures.alone, "an ordinary failure since does not make it harmless"
    with pytest.raises(HookFailed, match="it held up its process"):
        failures.note(BLOCKED, counts=True)


def test_a_group_does_without_rollouts_down_to_the_fewest() -> None:
    late, losses = DeadlineExceeded("it", "them", 1.0, "it is lost"), GroupLosses(5, 3)
    losses.lose(RAISED)
    losses.lose(late)
    with pytest.raises(DeadlineExceeded):
        losses.lose(late)
    with pytest.raises(HookFailed):
        GroupLosses(1, 1).lose(RAISED)
