"""Waiting for a condition, with a deadline that a slow machine does not reach."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

DEADLINE = 90.0


async def until(condition: Callable[[], Any], what: str, deadline: float = DEADLINE, pause: float = 0.05) -> Any:
    """Asks ``condition`` (plain or async) again and again; returns its first answer that is true.

    Raises AssertionError, saying ``what`` was awaited, after ``deadline`` seconds.
    """
    end = time.monotonic() + deadline
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come within {deadline:g} s")
        await asyncio.sleep(pause)


def wait_until(condition: Callable[[], T], what: str, deadline: float = DEADLINE, pause: float = 0.02) -> T:
    """As `until`, outside an event loop."""
    end = time.monotonic() + deadline
    while not (answer := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come within {deadline:g} s")
        time.sleep(pause)
    return answer
