"""What a decode engine's service does with a request: both engines get it, and no answer comes whose prompt another version computed.

Engines of both kinds are played over their real sockets by what SGLang's protocol says: the decode engine answers a room once a prefill
engine has computed it, or its request is aborted. Between them are the real transport, the real proxy and the real clients.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import aiohttp
import numpy as np
import pytest
import structlog
from aiohttp import web

from services.gateway.replicas import GenerationClient
from services.rollout import prefill_engines
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import Generation, GenerationRequest
from services.rollout.engine.private_endpoints import SOCKET
from services.rollout.engine.transport import EngineError, EngineTransport
from services.rollout.engine_proxy import EngineProxy
from services.rollout.prefill_engines import DecodeTransport, PrefillEngines
from services.rollout.served_version import ServedVersion
from shared.config.engine_limits import Capabilities
from shared.data.media import ShownPictures
from shared.formats.request import TurnRefused
from shared.runtime.telemetry import Metrics
from shared.schema.messages import Sampling
from shared.service.engine_load_balancer import BODY_BYTES
from shared.service.service_base import Service
from shared.sessions.session import TurnRequest
from tests.support.http_server import served
from tests.support.waiting import until

CAN = Capabilities(release="0.5.20", vocab_size=64, max_sequence=64, weight_sessions=False, overlaps=False)
KEY, VERSION = "k" * 32, 3


class Pair:
    """A decode engine, and prefill engines behind proxies. ``asked``: what engines were asked for, by kind. ``computing``: prefill engines
    compute while it is set. ``begins_at``: the version under which the decode engine begins."""

    def __init__(self, directory: Path, opened: AsyncExitStack) -> None:
        self._directory, self._open = directory, opened
        self._rooms: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.computing, self.begins_at = asyncio.Event(), VERSION
        self.computing.set()
        self.asked: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.aborted: list[str] = []
        self.prefill: list[tuple[EngineClient, ServedVersion]] = []
        self.engines = PrefillEngines(
            cast(Service, SimpleNamespace(log=structlog.get_logger(), metrics=Metrics("run", "decode"))), lambda: self.decode.version
        )
        self.engines.key = KEY

    async def start(self) -> "Pair":
        self.engines.session = await self._open.enter_async_context(aiohttp.ClientSession())
        where = await self._serve("decode")
        self.decode = await self._open.enter_async_context(EngineClient(DecodeTransport(where, self.engines), CAN, VERSION, where))
        return self

    async def add_prefill(self, version: int = VERSION) -> None:
        where = await self._serve(f"prefill{len(self.prefill)}")
        client = await self._open.enter_async_context(EngineClient(EngineTransport(where), CAN, version, where))
        served = ServedVersion(version=version, engine_is_up=True)
        proxy = EngineProxy(served, lambda: client, Metrics("run", where.name), 8, 20.0, 20.0)
        proxy.gateway_key = KEY
        await proxy.open("127.0.0.1")
        self._open.push_async_callback(proxy.close)
        self.prefill.append((client, served))
        self.engines.known[f"{proxy.url}#8998"] = where.name

    async def generation(self) -> Generation:
        sampling = Sampling(temperature=1.0, max_new_tokens=4)
        [found] = await self.decode.generate_group([GenerationRequest([5, 6, 7], 4, rid="sample")], sampling, deadline=60)
        return found

    async def _serve(self, kind: str) -> Path:
        async def generate(request: web.Request) -> web.Response:
            body = await request.json()
            self.asked[kind].append(body)
            return await self._decoded(body) if kind == "decode" else await self._prefilled(body)

        async def abort(request: web.Request) -> web.Response:
            self.aborted.append((await request.json())["rid"])
            return web.json_response({})

        where, routes = self._directory / kind, (web.post("/generate", generate), web.post("/abort_request", abort))
        where.mkdir()
        await self._open.enter_async_context(served(*routes, socket=where / SOCKET, shutdown_timeout=0.1))
        return where

    async def _prefilled(self, body: dict[str, Any]) -> web.Response:
        await self.computing.wait()
        self._rooms[body.get("bootstrap_room", 0)].set()
        return web.json_response([self._answer(body, 1)])

    async def _decoded(self, body: dict[str, Any]) -> web.Response:
        before = len(self.aborted)
        while not self._rooms[body["bootstrap_room"]].is_set():
            if any(body["rid"][0].startswith(rid) for rid in self.aborted[before:]):
                return web.json_response({"error": {"message": "Decode transfer failed: aborted"}}, status=500)
            await asyncio.sleep(0.01)
        return web.json_response([self._answer(body, 4)])

    def _answer(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        spans = [{"version": str(self.begins_at), "start": 0, "end": count}]
        meta = {"id": body["rid"][0], "finish_reason": {"type": "length"}, "weight_versions": spans, "completion_tokens": count}
        return {"output_ids": [9] * count, "meta_info": meta | {"prompt_tokens": 1, "output_token_logprobs": [[-1.0, 9, None]] * count}}


@pytest.fixture
async def pair(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(prefill_engines, "RETRY_SECONDS", 0.01)
    async with AsyncExitStack() as opened:
        yield await Pair(tmp_path_factory.mktemp("p"), opened).start()


async def test_pictures_beyond_the_body_of_an_open_address_come_to_engines(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From gateways as they are stored, and for prefill in base64. What is more is refused for good: no other replica would take it."""
    await pair.add_prefill()
    rule = Mock(media_type="image/png", forbidden=(), unexpanded=np.array)
    shown = ShownPictures(rule, (b"p" * BODY_BYTES,))
    sampling = Sampling(temperature=1.0, max_new_tokens=4)
    [found] = await pair.decode.generate_group([GenerationRequest([5], 4, rid="sample", shown=shown)], sampling, deadline=60)
    assert len(found.tokens) == 4
    client, url = GenerationClient(Mock(gateway_key=AsyncMock(return_value=KEY))), next(iter(pair.engines.known)).partition("#")[0]
    asked = TurnRequest(request="r", input_ids=np.array([5], np.int32), sampling=sampling, seconds=1e6, pictures=shown.pictures)
    try:
        assert (await client.generate(url, asked)).completion.tolist() == [9]
        monkeypatch.setattr("services.rollout.engine_proxy.KEYED_BYTES", 1000)
        with pytest.raises(TurnRefused, match="a body of at most 1000 bytes"):
            await client.generate(url, asked.model_copy(update={"pictures": (b"p" * 1000,)}))
    finally:
        await client.close()


async def test_both_engines_get_a_request_with_one_room(pair: Pair) -> None:
    await pair.add_prefill()
    pair.prefill[0][0]._loads = 7
    found = await pair.generation()
    assert (found.tokens.tolist(), found.spans[0].version) == ([9] * 4, VERSION)
    [[prefill], [decode]] = pair.asked["prefill0"], pair.asked["decode"]
    own, others = pair.prefill[0][0].cache_key, pair.decode.cache_key
    assert prefill.pop("extra_key") == own and own.endswith(".v3.7") and not prefill.pop("stream"), "prefixes are those of its own load"
    pair.decode._loads = 7
    assert own not in (others, pair.decode.cache_key), "a store that outlives engines would hand these what others have computed"
    assert prefill == {name: value for name, value in decode.items() if name != "extra_key"}
    assert (decode["bootstrap_host"], decode["bootstrap_port"]) == ("127.0.0.1", 8998)


async def test_a_prompt_of_other_weights_is_never_used(pair: Pair) -> None:
    """A prefill engine that is newer computes nothing, and one whose weights are loaded anew meanwhile is not believed."""
    await pair.add_prefill(VERSION + 1)
    with pytest.raises(EngineError, match=r"prefill0.*serves version 4, not 3"):
        await pair.generation()
    assert not pair.asked["prefill0"] and set(pair.aborted) == {"sample$"}
    client, served = pair.prefill[0]
    client.version = served.version = VERSION
    pair.computing.clear()
    generating = asyncio.create_task(pair.generation())
    await until(lambda: pair.asked["prefill0"], "a prompt that is computed", 20)
    client._loads += 1
    pair.computing.set()
    assert len((await generating).tokens) == 4
    assert len(pair.asked["prefill0"]) == 2, "it was taken although another load of the version had begun"
    pair.begins_at = VERSION + 1  # the decode engine's weights came between the prompt and the first token
    found = await pair.generation()
    assert (found.finish, len(found.tokens)) == ("abort", 0)


async def test_an_older_prefill_engine_is_awaited(pair: Pair) -> None:
    await pair.add_prefill(VERSION - 1)
    generating = asyncio.create_task(pair.generation())
    await until(lambda: pair.asked["decode"], "the request", 20)
    client, served = pair.prefill[0]
    assert not pair.asked["prefill0"]
    client.version = served.version = VERSION
    assert len((await generating).tokens) == 4


async def test_a_request_goes_to_another_prefill_engine_where_one_has_died(pair: Pair) -> None:
    pair.engines.known["http://127.0.0.1:9#1"] = "dead"
    with pytest.raises(EngineError, match="dead"):
        await pair.generation()
    await pair.add_prefill()
    assert len((await pair.generation()).tokens) == 4
    assert len(pair.asked["prefill0"]) == 1


async def test_what_its_caller_aborts_is_not_tried_again(pair: Pair) -> None:
    await pair.add_prefill()
    pair.computing.clear()
    generating = asyncio.create_task(pair.generation())
    await until(lambda: pair.asked["prefill0"] and pair.asked["decode"], "the request", 20)
    await pair.decode.abort(["sample"])
    with pytest.raises(EngineError, match="aborted"):
        await generating
    assert len(pair.asked["decode"]) == 1
    await until(lambda: len(pair.aborted) == 2, "its end in the prefill engine", 20)
