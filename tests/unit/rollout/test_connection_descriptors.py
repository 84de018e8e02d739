"""Descriptors of a replica and of its engine follow the requests in flight, and come back when these have ended."""

import asyncio
import os
import time
from pathlib import Path

from aiohttp import web

from services.rollout.engine.private_endpoints import SOCKET
from services.rollout.engine.transport import IDLE_SECONDS, EngineTransport

REQUESTS = 8
BACK_SECONDS = 10 * IDLE_SECONDS


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_idle_connections_are_closed(tmp_path: Path):
    """Both ends are in this process, so that each request in flight has two descriptors."""
    go_on, arrived = asyncio.Event(), 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal arrived
        arrived += 1
        await go_on.wait()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / SOCKET)).start()
    transport = EngineTransport(tmp_path)
    before = descriptors()
    asked = [asyncio.create_task(transport.post("/generate", {}, 60.0, "nothing")) for _ in range(REQUESTS)]
    async with asyncio.timeout(30):
        while arrived < REQUESTS:
            await asyncio.sleep(0.01)
    assert descriptors() >= before + 2 * REQUESTS
    go_on.set()
    await asyncio.gather(*asked)
    end = time.monotonic() + BACK_SECONDS
    while descriptors() > before and time.monotonic() < end:
        await asyncio.sleep(0.05)
    assert descriptors() <= before
    await transport.close()
    await runner.cleanup()
