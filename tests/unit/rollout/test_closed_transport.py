"""Whoever asks an engine whose client is closed meanwhile finds it away, also in the middle of an answer."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from services.rollout.engine.private_endpoints import SOCKET
from services.rollout.engine.transport import EngineTransport, EngineUnreachable


async def test_a_closed_client_is_an_engine_out_of_reach(tmp_path: Path):
    transport = EngineTransport(tmp_path)
    await transport.close()
    with pytest.raises(EngineUnreachable, match="its client is closed"):
        await transport.post("/continue_generation", None, 1.0, "nothing was changed")
    with pytest.raises(EngineUnreachable, match="its client is closed"):
        async with transport.stream("/generate", b"{}"):
            pass


@pytest.mark.parametrize("begun", [b"", b'data: {"text": ""}\n\n', b'data: {"te'])
async def test_who_reads_an_answer_when_the_client_is_closed_is_woken(begun: bytes, tmp_path: Path):
    """aiohttp closes the connection and wakes no one: the turn of a gateway waited to its own deadline for an engine that was gone."""
    asked, over = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(begun)
        asked.set()
        await over.wait()
        return response

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / SOCKET)).start()
    transport = EngineTransport(tmp_path)

    async def read() -> None:
        async with transport.events("/generate", {}) as events:
            async for _ in events:
                pass

    reading = asyncio.create_task(read())
    whole = asyncio.create_task(transport.post("/generate", {}, 600.0, "nothing"))
    async with asyncio.timeout(60):
        await asked.wait()
        await asyncio.sleep(0.1)
        await transport.close()
        for task in (reading, whole):
            with pytest.raises(EngineUnreachable):
                await task
    over.set()
    await runner.cleanup()
