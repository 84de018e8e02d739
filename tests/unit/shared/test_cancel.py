"""Tasks that have to end, end."""

import asyncio

import pytest
import structlog

from shared.runtime.cancellation import cancelled


async def stubborn(times: int) -> None:
    """Swallows so many cancellations, as `asyncio.wait_for` may."""
    for _ in range(times):
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(600)


async def failing() -> None:
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        raise RuntimeError("in the middle of it") from None


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_a_task_that_swallows_cancellations_ends(times: int) -> None:
    tasks = [asyncio.create_task(stubborn(times)), asyncio.create_task(failing()), asyncio.create_task(asyncio.sleep(0))]
    await asyncio.sleep(0.01)
    await cancelled(tasks)
    assert all(task.done() for task in tasks)
    assert tasks[0].cancelled()
    assert isinstance(tasks[1].exception(), RuntimeError)


async def test_one_that_does_not_end_is_left_after_the_deadline() -> None:
    task = asyncio.create_task(stubborn(5), name="mule")
    await asyncio.sleep(0.01)
    with structlog.testing.capture_logs() as logs:
        await cancelled([task], deadline=0.5)
    assert logs == [{"event": "tasks_not_ended", "tasks": ["mule"], "seconds": 0.5, "log_level": "error"}]
    assert not task.done()
    await cancelled([task])
    assert task.cancelled()


async def test_nothing_to_end_is_fine() -> None:
    await cancelled([])
