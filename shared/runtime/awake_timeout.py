"""A deadline that does not run while engines sleep for a trainer on their GPUs (`colocate`)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LOOK_INTERVAL_S = 0.5
"""The interval at which is seen whether engines sleep; a sleep is counted to about so much."""


@asynccontextmanager
async def awake_timeout(seconds: float, asleep: Callable[[], bool] | None) -> AsyncIterator[None]:
    """As `asyncio.timeout`, of so many seconds in which nothing sleeps. ``asleep``: whether engines do; None: they never do."""
    async with asyncio.timeout(seconds) as limit:
        keeping = None if asleep is None else asyncio.create_task(_stand_still(limit, asleep))
        try:
            yield
        finally:
            if keeping is not None:
                keeping.cancel()


async def _stand_still(limit: asyncio.Timeout, asleep: Callable[[], bool]) -> None:
    """Puts a deadline off by the time asleep, until it is cancelled."""
    before = asyncio.get_running_loop().time()
    while True:
        slept = asleep()  # at the interval's begin: the deadline must not pass within it
        if slept:
            put_off(limit, LOOK_INTERVAL_S)
        await asyncio.sleep(LOOK_INTERVAL_S)
        now = asyncio.get_running_loop().time()
        if slept:
            put_off(limit, now - before - LOOK_INTERVAL_S)
        before = now


def put_off(limit: asyncio.Timeout, seconds: float) -> None:
    """Puts a deadline off that has not passed yet."""
    when = limit.when()
    if when is not None and not limit.expired():
        limit.reschedule(when + seconds)
