"""Requests to an engine: sent again, cut off, and with the machine's certificates."""

import asyncio
import importlib
import ssl
from pathlib import Path
from typing import Any

import certifi
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from httpx import AsyncClient
from openai import AsyncOpenAI

from services.rollout.engine.private_endpoints import SOCKET
from services.rollout.engine.transport import EngineTransport, EngineUnreachable
from services.rollout.function_worker import share_certificates
from services.rollout.weight_receiver import answered_once
from shared.runtime.errors import MyxoError
from shared.schema.messages import Accepted, Message
from shared.schema.weight_messages import WeightsReceive
from tests.support.http_server import served


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

    async with served(web.post("/generate", answer), socket=tmp_path / SOCKET):
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


# --- a request that is sent again gets the outcome of the first, and is handled once


def receive(push: int) -> WeightsReceive:
    return WeightsReceive(version=1, push=push, channels=["c"], deadline=60)


class Handler:
    """Counts the requests that it is given; push 9 is one that fails."""

    def __init__(self) -> None:
        self.taken, self.going_on = list[int](), asyncio.Event()

    async def handle(self, request: WeightsReceive) -> Message:
        self.taken.append(request.push)
        await self.going_on.wait()
        if request.push == 9:
            raise MyxoError("the channel broke")
        return Accepted()


async def test_a_repeated_request_is_handled_once_while_it_runs_and_after() -> None:
    handler = Handler()
    once = answered_once(handler.handle)
    first, again = asyncio.ensure_future(once(receive(2))), asyncio.ensure_future(once(receive(2)))
    await asyncio.sleep(0)
    again.cancel()  # its connection broke: the handling continues
    await asyncio.sleep(0)
    handler.going_on.set()
    assert await first is await once(receive(2))
    assert handler.taken == [2]
    await once(receive(4))
    assert handler.taken == [2, 4]


async def test_a_failure_is_repeated_too() -> None:
    handler = Handler()
    handler.going_on.set()
    once = answered_once(handler.handle)
    for _ in range(2):
        with pytest.raises(MyxoError, match="the channel broke"):
            await once(receive(9))
    assert handler.taken == [9]


# --- the clients of one process read the machine's certificates once


def context(client: Any) -> Any:
    return client._transport._pool._ssl_context


def test_clients_of_both_houses_share_them_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("httpx", "httpx2"):
        transports = importlib.import_module(f"{library}._transports.default")
        monkeypatch.setattr(transports, "create_ssl_context", transports.create_ssl_context)  # as it was, afterwards
    share_certificates()
    anthropics = [AsyncAnthropic(base_url="http://x", api_key="k")._client for _ in range(2)]
    assert context(anthropics[0]) is context(anthropics[1])
    shared = context(AsyncOpenAI(base_url="http://x/v1", api_key="k")._client)
    assert shared.verify_mode == ssl.CERT_REQUIRED and shared.check_hostname and shared.get_ca_certs()
    assert context(AsyncClient()) is shared
    unchecked = context(AsyncClient(verify=False))
    assert unchecked.verify_mode == ssl.CERT_NONE and shared.verify_mode == ssl.CERT_REQUIRED
    own = ssl.create_default_context()
    assert context(AsyncClient(verify=own)) is own
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    assert context(AsyncClient()) is not shared, "the variable is heard when it changes"
