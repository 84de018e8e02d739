"""Whatever a model samples, a real gateway answers it in each format and records it; requests that never become whole hold nothing."""

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from services.gateway import routes
from shared.bus.registry import Registry
from shared.data.tokenizer import Tokenizer
from shared.runtime import http_endpoints
from shared.runtime.addresses import HttpAddress
from shared.schema.message import MAX_SAMPLES
from shared.schema.messages import Sampling
from shared.sessions.session import trajectories
from shared.sessions.session_store import SessionStore
from tests.integration.buffer.conftest import NewRun, new_run
from tests.support.gateways import Played, ready_gateway, started_gateway
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.scripted_replica import scripted_replica
from tests.support.service_process import ROOT

__all__ = ["new_run"]

CALLS = [
    '{"name": "add", "arguments": {"a": 1000000000000000000000000000000}}',
    '{"name": "add", "arguments": {"a": "\\ud83d"}}',
    '{"name": "add", "arguments": {"\\ude00": 1}}',
    '{"name": "\\ud83d", "arguments": {}}',
    '{"name": "add", "arguments": {"a": NaN}}',
]
"""What stands in calls; a half of a surrogate pair is spelled by JSON's escape."""

ADD = {"name": "add", "description": "Adds."}
FORMATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": ADD}]},
    "/v1/responses": {"input": "x", "tools": [{"type": "function", **ADD}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "tools": [{**ADD, "input_schema": {}}], "max_tokens": 500},
}


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    model = write_qwen3_tokenizer(tmp_path / "policy", template=None)
    shutil.copy(ROOT / "tests" / "support" / "qwen3_chat_template.jinja", model / "chat_template.jinja")
    return model


async def test_whatever_is_sampled_is_answered_and_recorded(new_run: NewRun, tiny_model: Path, tmp_path: Path) -> None:
    player = await new_run()
    registry, sessions = Registry(player.bus, player.config.run.name), SessionStore(player.store, player.config.run.name)
    called = [""]
    async with scripted_replica(registry, Tokenizer(tiny_model), lambda prompt: f"<tool_call>\n{called[0]}\n</tool_call>") as replica:
        with started_gateway(0, tmp_path, player.environment("gateway-0")) as process:
            url = await ready_gateway(registry, 0, process)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
                played = await Played.opened(sessions, sampling=Sampling(temperature=1.0, max_new_tokens=500), seed=7)
                headers = {"Authorization": f"Bearer {played.key}"}
                for called[0] in CALLS:
                    for path, body in FORMATS.items():
                        for stream in (False, True):
                            asked = {"model": "policy", "stream": stream, **body}
                            async with http.post(url + path, json=asked, headers=headers) as answer:
                                text = await answer.text()
                            assert answer.status == 200 and '"error": {' not in text and '"error":{' not in text, (called[0], path, text)
                            assert ("malformed_tool_calls" in text) == (called[0] != CALLS[0]), (called[0], path, text)
                several = {"model": "policy", "n": 3, **FORMATS["/v1/chat/completions"]}
                async with http.post(f"{url}/v1/chat/completions", json=several, headers=headers) as answer:
                    first = (await answer.json())["id"]
                async with http.post(f"{url}/v1/session/end", json={"reward": {"style": 1.0}}, headers=headers) as answer:
                    refused = await answer.json()
                assert (answer.status, refused["error"]["param"]) == (400, "reward"), "the reward that counts is missing"
    log = await played.log()
    assert len(log.turns) == len(CALLS) * len(FORMATS) * 2 + 3 and not log.pending and log.ended is None
    for name, turn in log.turns.items():
        request, given = replica.given[name]
        for recorded, sampled in ((turn.prompt, request.input_ids), (turn.completion, given.completion), (turn.log_probs, given.log_probs)):
            np.testing.assert_array_equal(recorded, sampled)
    assert sum(int(one.mask.sum()) for one in trajectories(log.turns.values())) == sum(len(turn.completion) for turn in log.turns.values())
    seeds = [replica.given[first + choice][0].seed for choice in ("", "n1", "n2")]
    before = (seeds[0] - 7) // MAX_SAMPLES  # requests for the same prompt, each of which has a seed of its own
    assert before and seeds == [7 + (before + number) * MAX_SAMPLES for number in range(3)], "none of another rollout of the group"
    assert json.loads(process.words().splitlines()[-1]) and "Traceback" not in process.words()


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
