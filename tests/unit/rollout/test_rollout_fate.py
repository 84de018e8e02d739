"""When a rollout is tried again, when alone, when it is lost, and when its group is."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.rollout import custom_generate
from services.rollout.played_group import DISRUPTIVE_TRIES, TRIES, GroupProgress, RolloutFailures
from shared.config.rollout_section import RolloutSection
from shared.hooks import HookFailed, HookSample, Status
from shared.runtime.errors import DeadlineExceeded
from shared.schema.messages import Sampling, Task

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
    late, progress = DeadlineExceeded("it", "them", 1.0, "it is lost"), GroupProgress(5, 3)
    progress.lose(RAISED)
    progress.lose(late)
    with pytest.raises(DeadlineExceeded):
        progress.lose(late)
    with pytest.raises(HookFailed):
        GroupProgress(1, 1).lose(RAISED)


def test_a_group_is_complete_with_those_that_end_first() -> None:
    progress = GroupProgress(2, 1, surplus=2)
    assert list(progress.begun) == [0, 1, 2, 3]
    progress.end(3)
    assert not progress.complete and progress.aborted == 0
    progress.end(1)
    assert progress.complete and progress.kept == {1, 3} and progress.aborted == 2
    progress.end(0)
    assert progress.kept == {1, 3} and progress.aborted == 2, "what ended too late is aborted as well"


def test_failures_are_replaced_by_surplus_rollouts_before_they_are_tried_again() -> None:
    progress = GroupProgress(2, 1, surplus=1)
    with pytest.raises(HookFailed):
        progress.check_needed(RAISED)
    progress.lose(RAISED)
    progress.check_needed(RAISED)
    progress.end(0)
    progress.end(1)
    assert progress.complete and progress.aborted == 0, "a failure is none of the aborted ones"


def task_of(group: str) -> Task:
    return Task(
        group=group,
        n=3,
        prompt="1",
        prompt_tokens=np.array([1], np.int32),
        environment="math",
        sampling=Sampling(temperature=1.0, max_new_tokens=1),
        min_version=0,
    )


@pytest.mark.parametrize(("group", "begun"), [("g00000001", 5), ("eval.heldout.0.1", 3)])
def test_held_out_prompts_have_no_surplus(group: str, begun: int) -> None:
    settings = RolloutSection(num_rollout=1, rollout_batch_size=1, n_samples_per_prompt=3, surplus_rollouts=2)
    task = task_of(group)
    progress = GroupProgress.of(task, settings)
    assert len(progress.begun) == begun
    if begun == task.n:
        with pytest.raises(HookFailed):
            progress.lose(RAISED)


@pytest.mark.parametrize("asleep", [True, False])
async def test_the_time_of_a_function_s_call_does_not_run_while_the_engine_sleeps(asleep: bool) -> None:
    """A call that ends after more seconds than its rollout has: a trainer computed on the engine's GPUs meanwhile."""

    async def call(*_: object) -> tuple[list[HookSample], tuple[int, bool]]:
        await asyncio.sleep(0.1)
        return [HookSample(status=Status.COMPLETED)], (-1, False)

    def late(task: Task, index: int) -> DeadlineExceeded:
        return DeadlineExceeded("it", "them", 0.05, "it is lost")

    parts: Any = {"choices": None, "kept": False, "log_probs_reader": None, "goes_on": False}
    replica = SimpleNamespace(version=0, serving=True, incarnation=1)
    functions = SimpleNamespace(replica=replica, seconds=0.05, asleep=lambda: asleep, call=call, late=late, **parts)
    rollout = custom_generate._Rollout(functions, task_of("g00000001"), 0, [], None, GroupProgress(1, 1))  # type: ignore[arg-type]
    [given], _ = await rollout._called(HookSample(), 0)
    assert given.status is Status.COMPLETED
    if asleep:
        assert rollout.patience_s() > 0
    else:
        with pytest.raises(DeadlineExceeded):
            rollout.patience_s()
