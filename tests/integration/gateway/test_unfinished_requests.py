"""Requests that never become whole: they hold nothing that others need, and nothing for long."""

import asyncio
import contextlib
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from services.gateway import routes
from shared.bus.registry import Registry
from shared.runtime import http_endpoints
from shared.runtime.addresses import HttpAddress
from shared.sessions.session_store import SessionStore
from tests.integration.buffer.conftest import NewRun, new_run
from tests.support.gateways import Played, ready_gateway, started_gateway

__all__ = ["new_run"]

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(address: str, head: str) -> Connection:
    """A connection on which so much of a request was sent."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode())
    await writer.drain()
    return reader, writer


async def closed(connections: list[Connection], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        for reader, _ in connections:
            with contextlib.suppress(ConnectionError):
                await reader.read()


@pytest.mark.extra
async def test_a_session_whose_bodies_never_come_takes_nothing_from_others_nor_from_the_gateways_end(
    new_run: NewRun, tmp_path: Path
) -> None:
    player = await new_run(gateway={"gateway_requests": 100})
    sessions = SessionStore(player.store, player.config.run.name)
    greedy, modest = await Played.opened(sessions), await Played.opened(sessions)
    with started_gateway(0, tmp_path, player.environment("gateway-0")) as gateway:
        url = await ready_gateway(Registry(player.bus, player.config.run.name), 0, gateway)
        address = url.removeprefix("http://")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {greedy.key}\r\nContent-Length: 999\r\n\r\n{{"
        held = [await opened(address, head) for _ in range(routes.SESSION_REQUESTS + 60)]
        async with asyncio.timeout(60):  # those beyond the session's bound are answered
            refused = await asyncio.wait([asyncio.create_task(reader.readline()) for reader, _ in held], timeout=5)
        answers = [task.result() for task in refused[0]]
        assert len(answers) == 60 and all(b"429" in line for line in answers)
        [task.cancel() for task in refused[1]]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(20):
                found = await client.get("/v1/session", headers={"Authorization": f"Bearer {modest.key}"})
                assert found.status_code == 200, found.text
        assert gateway.stop() == 0, "and with all of them open it ends, long before their bodies' time is over"
        for _, writer in held:
            writer.close()


async def test_half_a_head_is_not_waited_for_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(http_endpoints, "HEAD_SECONDS", 0.5)
    app = Starlette()
    async with http_endpoints.serving(app, HttpAddress("127.0.0.1", 0)) as address:
        heads = ("", "GET / HTTP/1.1\r\nHos", "GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT")
        half = [await opened(address, head) for head in heads for _ in range(20)]
        await closed(half, 30)
        whole = await opened(address, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"404" in await whole[0].readline()
        for _, writer in [*half, whole]:
            writer.close()


async def test_a_request_that_trickles_in_is_answered_where_its_head_is_there_in_time() -> None:
    app = Starlette()
    async with http_endpoints.serving(app, HttpAddress("127.0.0.1", 0)) as address:
        reader, writer = await opened(address, "")
        for part in ("GET / HT", "TP/1.1\r\nHost", ": x\r\n", "\r\n"):
            writer.write(part.encode())
            await writer.drain()
            await asyncio.sleep(0.05)
        assert b"404" in await reader.readline()
        writer.close()
