"""How long the trainer waits: for a batch, and at the run's end for an evaluation."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from services.trainer.commands import Wait
from services.trainer.step_scheduler import PUSH_SECONDS, BatchRequester
from services.trainer.weights.push_schedule import PushRecord
from shared.runtime.errors import DeadlineExceeded
from shared.schema.messages import Batch, BatchAnswer, BatchPending


class Pending:
    """A buffer that has no batch yet; at the run's end it needs none."""

    def __init__(self, need: int) -> None:
        self._answer: BatchAnswer = BatchPending(step=3, have=0, need=need, waiting_for="the evaluation of aime")

    def batch(self, step: int, version: int, hold: bool = True) -> BatchAnswer:
        return self._answer

    def report_activity(self, what: str, awaited_from: Sequence[str], next_action: str) -> None:
        assert what in ("the batch of step 3", "the run's end") and list(awaited_from) == ["buffer"] and "the trainer stops" in next_action


def requester(need: int, timeout: float, evaluation: float) -> BatchRequester:
    control: Any = Pending(need)
    return BatchRequester(control, None, timeout, evaluation)


def test_an_evaluation_at_the_end_has_its_own_time_besides() -> None:
    waiting = requester(0, 0.0, 1000.0)
    assert waiting.next(3, 3) == Wait(save=False)
    time.sleep(0.01)
    assert waiting.next(3, 3) == Wait(save=False)


@pytest.mark.parametrize(("need", "evaluation"), [(8, 1000.0), (0, 0.0)])
def test_a_wait_that_is_too_long_names_what_is_awaited(need: int, evaluation: float) -> None:
    waiting = requester(need, 0.0, evaluation)
    waiting.next(3, 3)
    time.sleep(0.01)
    with pytest.raises(DeadlineExceeded, match="the evaluation of aime"):
        waiting.next(3, 3)


def test_a_wait_for_what_is_refused_of_a_batch_begins_with_it() -> None:
    waiting = requester(8, 0.0, 0.0)
    control: Any = waiting._control
    assert waiting.next(3, 3) == Wait(save=False)
    pending, control._answer = control._answer, Batch(step=3, version=3, groups=[])
    assert waiting.next(3, 3) == control._answer
    time.sleep(0.01)
    control._answer = pending
    assert waiting.next(3, 3) == Wait(save=False)


def test_a_push_that_holds_up_what_is_awaited_is_named() -> None:
    record = PushRecord(3, ["rollout-0", "rollout-1"], {}, 0.0)
    control: Any = Pending(8)
    waiting = BatchRequester(control, None, 0.0, push=lambda: record.wait(["rollout-1"], PUSH_SECONDS + 1))
    waiting.next(3, 3)
    time.sleep(0.01)
    words = r"the push of version 3 \(prepare\), which the batch of step 3 waits for did not come from rollout-1"
    with pytest.raises(DeadlineExceeded, match=words):
        waiting.next(3, 3)
