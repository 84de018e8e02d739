"""A deadline that stands still while engines sleep, and runs afterwards."""

import asyncio

import pytest

from shared.runtime.tasks import awake_timeout

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
