"""Cancels tasks repeatedly until they have ended, and lets what must not be cut short come to its end."""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import structlog

REPEAT_SECONDS = 0.2
"""The seconds after which a task that still runs is cancelled again."""


async def cancelled(tasks: Iterable[asyncio.Task[Any]], deadline: float = 10.0) -> None:
    """Cancels tasks and waits until they have ended; their errors are dropped.

    One request is not enough: `asyncio.wait_for` (before Python 3.12) swallows a cancellation that arrives just as its own wait ends,
    and a loop around it continues for ever. A task that outlives ``deadline`` seconds of requests is logged and left alone.
    """
    end = time.monotonic() + deadline
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=REPEAT_SECONDS)
        if left and time.monotonic() > end:
            structlog.get_logger().error("tasks_not_ended", tasks=sorted(task.get_name() for task in left), seconds=deadline)
            return


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits ``work`` to its end, which has to have a deadline of its own, and only then raises a cancellation that came meanwhile.

    It is for what has to be let go of: `cancelled` asks again every `REPEAT_SECONDS`, and would otherwise end that, too.
    """
    task, interruption = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            interruption = error
    task.result()
    if interruption is not None:
        raise interruption
