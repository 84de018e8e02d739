"""Descriptors of a replica and of its engine follow the requests in flight, and come back when these have ended."""

import asyncio
import os
from pathlib import Path

from aiohttp import web

from services.rollout.engine.private_endpoints import SOCKET
from services.rollout.engine.transport import IDLE_SECONDS, EngineTransport
from tests.support.http_server import served
from tests.support.waiting import until

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

    async with served(web.post("/generate", answer), socket=tmp_path / SOCKET):
        transport = EngineTransport(tmp_path)
        before = descriptors()
        asked = [asyncio.create_task(transport.post("/generate", {}, 60.0, "nothing")) for _ in range(REQUESTS)]
        async with asyncio.timeout(30):
            while arrived < REQUESTS:
                await asyncio.sleep(0.01)
        assert descriptors() >= before + 2 * REQUESTS
        go_on.set()
        await asyncio.gather(*asked)
        await until(lambda: descriptors() <= before, "the end of the connections", BACK_SECONDS)
        await transport.close()
