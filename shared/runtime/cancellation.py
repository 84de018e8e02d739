"""Cancels tasks repeatedly until they have ended."""

import asyncio
import time
from collections.abc import Iterable
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
