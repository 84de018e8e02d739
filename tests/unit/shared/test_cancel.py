"""Tasks that have to end, and a deadline that stands still."""

import asyncio

import pytest
import structlog

from shared.runtime.tasks import REPEAT_SECONDS, awake_timeout, cancelled, gathered, to_the_end


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


async def test_the_first_of_several_that_fails_ends_the_others() -> None:
    ended = []

    async def work(answer: int, fails: bool = False) -> int:
        try:
            await asyncio.sleep(0 if answer == 1 or fails else 600)
            return 1 // (not fails)
        finally:
            await asyncio.sleep(0.01)
            ended.append(answer)

    assert await gathered(work(1) for _ in range(2)) == [1, 1]
    with pytest.raises(ZeroDivisionError):
        await gathered([work(1), work(2), work(3, fails=True)])
    assert ended == [1, 1, 1, 3, 2], "each has ended, to its last line"


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


async def test_letting_go_is_not_cut_short_by_a_second_request() -> None:
    let_go = []

    async def forgotten() -> None:
        await asyncio.sleep(3 * REPEAT_SECONDS)
        let_go.append("session")

    async def play() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await to_the_end(forgotten())

    task = asyncio.create_task(play())
    await asyncio.sleep(0.01)
    await cancelled([task])
    assert task.cancelled() and let_go == ["session"]


async def test_letting_go_tells_its_error() -> None:
    async def refused() -> None:
        raise RuntimeError("the store is away")

    with pytest.raises(RuntimeError, match="the store is away"):
        await to_the_end(refused())


# --- a deadline that stands still while engines sleep, and runs afterwards

SECONDS = 1.0


@pytest.mark.timeout(120)
async def test_no_time_runs_while_asleep_and_what_was_left_runs_afterwards() -> None:
    asleep = True
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with awake_timeout(SECONDS, lambda: asleep):
            await asyncio.sleep(2 * SECONDS)
            asleep = False
            await asyncio.Event().wait()
    assert loop.time() - began >= 3 * SECONDS - 0.5


@pytest.mark.timeout(60)
async def test_where_nothing_sleeps_it_is_an_ordinary_deadline() -> None:
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.1, None):
            await asyncio.Event().wait()
    async with awake_timeout(60.0, lambda: True):
        pass
