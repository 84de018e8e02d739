"""The door of a real engine: what comes through it, and what does not, whoever asks and however."""

import asyncio
import contextlib
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web_protocol

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine_proxy import SPARE_CONNECTIONS, EngineProxy
from services.rollout.served_version import ServedVersion
from shared.runtime.addresses import LOOPBACK
from shared.runtime.telemetry import Metrics
from shared.service.engine_load_balancer import BODY_BYTES
from tests.integration.engine.load import load
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

LIMIT = 8
LONG_SECONDS = 120.0
PROMPT = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "temperature": 0.0}}
ENDLESS = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}


class Door:
    """A proxy before a real engine, and what its replica would say of itself."""

    def __init__(self, client: EngineClient) -> None:
        self.served, self.client, self.metrics = ServedVersion(), client, Metrics("run", "rollout-1")
        self.served.engine_started()
        self.served.serve(0, "")
        self.proxy = EngineProxy(self.served, lambda: self.client, self.metrics, LIMIT, LONG_SECONDS, LONG_SECONDS)

    @property
    def address(self) -> tuple[str, int]:
        assert self.proxy.address is not None
        return self.proxy.address

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and JSON (or text) of the answer."""
        host, port = self.address
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session, session.request(method, path, json=body, **options) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def said(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """What it answers to these very bytes, until it closes the connection."""
        reader, writer = await asyncio.open_connection(*self.address)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return answer

    async def settled(self) -> None:
        """Waits until the engine holds no request."""
        await until(self._idle, "an engine without requests", 120)

    async def _idle(self) -> bool:
        now = await load(self.client)
        return now.running == now.waiting == 0

    async def busy(self) -> bool:
        return (await load(self.client)).running > 0


@pytest.fixture
async def door(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    # after a refusal aiohttp reads on for 10 s
    monkeypatch.setitem(web_protocol.RequestHandler.__init__.__kwdefaults__, "lingering_time", 0.5)
    made = Door(client)
    await made.proxy.open(LOOPBACK)
    yield made
    await made.proxy.close()
    await made.settled()


def listening(process: EngineProcess) -> list[tuple[str, int]]:
    """The TCP addresses on which the engine's processes listen."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for pid in process.members()
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


async def test_an_engine_listens_on_loopback_alone_and_speaks_http_on_none_of_its_ports(engine: EngineProcess) -> None:
    found = listening(engine)
    assert found and {host for host, _ in found} == {"127.0.0.1"}  # gloo's, and the store by which ranks meet
    opened = []
    for host, port in found:
        with contextlib.suppress(ConnectionResetError, ConnectionRefusedError):  # it listens no more
            opened.append(socket.create_connection((host, port), 10))
            opened[-1].sendall(b"GET /server_info HTTP/1.1\r\nHost: engine\r\n\r\n")
    end = time.monotonic() + 2.0
    for connection in opened:
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError), connection:
            connection.settimeout(max(0.01, end - time.monotonic()))
            answer = connection.recv(100)
        assert b"HTTP/" not in answer
    assert (engine.receiver.stat().st_mode & 0o777, engine.receiver.stat().st_uid) == (0o700, os.getuid())


async def test_an_engine_has_no_key_that_could_be_told(engine: EngineProcess, client: EngineClient) -> None:
    info = await client.transport.get("/server_info", 60)
    assert info["api_key"] is None and info["admin_api_key"] is None
    for pid in engine.members():
        assert not [word for word in psutil.Process(pid).cmdline() if "key" in word]
    assert engine.log_path is not None and "'admin_api_key': None" in engine.log_path.read_text()


async def test_what_comes_through(door: Door, client: EngineClient) -> None:
    assert await door.ask("GET", "/health") == (200, {"status": "ok"})
    status, models = await door.ask("GET", "/v1/models")
    assert status == 200 and models["data"][0]["max_model_len"] == 2048
    assert "root" not in models["data"][0]
    status, answer = await door.ask("POST", "/generate", {**PROMPT, "return_logprob": True})
    assert status == 200 and len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) == 3
    status, answers = await door.ask("POST", "/generate", {"input_ids": [[5, 6], [7]], "sampling_params": {"max_new_tokens": 2, "n": 2}})
    assert status == 200 and len(answers) == 4
    chat = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4, "temperature": 0.0}
    status, answer = await door.ask("POST", "/v1/chat/completions", chat)
    assert status == 200 and answer["choices"][0]["message"]["role"] == "assistant"


async def test_an_answer_is_streamed_as_it_comes(door: Door) -> None:
    host, port = door.address
    body = {**PROMPT, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}, "stream": True}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session, session.post("/generate", json=body) as answer:
        assert answer.content_type == "text/event-stream"
        events = [line async for line in answer.content if line.startswith(b"data: ")]
    assert len(events) > 5 and events[-1] == b"data: [DONE]\n"
    assert json.loads(events[-2][6:])["meta_info"]["completion_tokens"] == 40


async def test_none_of_the_engines_other_endpoints_comes_through(door: Door, client: EngineClient) -> None:
    """All that this SGLang lists of itself, by every method."""
    listed = await client.transport.get("/openapi.json", 60)
    allowed = {("GET", "/health"), ("GET", "/v1/models"), ("POST", "/generate"), ("POST", "/v1/chat/completions")}
    asked = 0
    for path in {*listed["paths"], "/metrics", "/server_info", "/update_weights_from_tensor", "/abort_request", "/flush_cache"}:
        for method in ("GET", "POST", "PUT", "DELETE"):
            if (method, path) not in allowed:
                status, answer = await door.ask(method, path, {} if method != "GET" else None)
                assert status == 404 and answer["error"].startswith("this address takes GET /health"), (method, path)
                asked += 1
    assert asked > 200
    assert door.metrics.values["engine_requests_denied"] == asked
    assert (await client.transport.get("/server_info", 60))["weight_version"] == "0"


HEAD = "Host: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


SPELLINGS = [
    "POST /generate/../update_weights_from_tensor HTTP/1.1",
    "POST /%75pdate_weights_from_tensor HTTP/1.1",
    "POST /%2e%2e/update_weights_from_tensor HTTP/1.1",
    "POST //update_weights_from_tensor HTTP/1.1",
    "POST /Update_Weights_From_Tensor HTTP/1.1",
    "POST /generate%00/../flush_cache HTTP/1.1",
    "POST /generate;/../flush_cache HTTP/1.1",
    "POST /generate?x=1 HTTP/1.1",
    "POST /GENERATE HTTP/1.1",
    "POST /generate/ HTTP/1.1",
    "GET /health/../server_info HTTP/1.1",
    "GET /health%2f..%2fserver_info HTTP/1.1",
    "GET /health#/server_info HTTP/1.1",
    "GET http://127.0.0.1/server_info HTTP/1.1",
    "GET \\server_info HTTP/1.1",
    "CONNECT 127.0.0.1:22 HTTP/1.1",
    "OPTIONS * HTTP/1.1",
    "TRACE /health HTTP/1.1",
    "HEAD /server_info HTTP/1.1",
    "post /generate HTTP/1.1",
    "GET /server_info HTTP/0.9",
    "PRI * HTTP/2.0",
]


async def test_no_spelling_of_a_path_gets_past_the_list(door: Door) -> None:
    passed = {}
    for first in range(0, len(SPELLINGS), LIMIT // 2):
        lines = SPELLINGS[first : first + LIMIT // 2]
        answers = await asyncio.gather(*(door.said(f"{line}\r\n{HEAD}".encode()) for line in lines))
        passed |= {line: one[:200] for line, one in zip(lines, answers, strict=True) if int(one.split(b" ", 2)[1]) not in (400, 404, 405)}
        assert await door.ask("GET", "/health") == (200, {"status": "ok"}), lines
    assert not passed


async def test_a_request_within_a_request_is_not_passed_on(door: Door, client: EngineClient) -> None:
    """Two lengths, or a length and chunks: what one server takes for the body, another takes for the next request."""
    inner = "POST /flush_cache HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    for framing in (f"Content-Length: 2\r\nContent-Length: {len(inner)}", f"Content-Length: {len(inner)}\r\nTransfer-Encoding: chunked"):
        said = await door.said(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n\r\n{inner}".encode())
        assert said.startswith(b"HTTP/1.0 400") or said.startswith(b"HTTP/1.1 400"), said[:100]
        assert b" 200 " not in said


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text": "x", "image_data": "file:///etc/passwd"}, "image_data"),
    ({"text": "x", "audio_data": "http://169.254.169.254/"}, "audio_data"),
    ({"text": "x", "lora_path": "/tmp"}, "lora_path"),
    ({"text": "x", "custom_logit_processor": "gASV"}, "custom_logit_processor"),
    ({"text": "x", "bootstrap_host": "10.0.0.1"}, "bootstrap_host"),
    ({"text": "x", "http_worker_ipc": "ipc:///tmp/x"}, "http_worker_ipc"),
    ({"text": "x", "session_params": {"id": "a"}}, "session_params"),
    ({"input_ids": [5, 10**6]}, "input_ids: .*token 1000000 is not in"),
    ({"input_ids": [-1]}, "input_ids: .*token -1"),
    ({"input_ids": []}, "prompt"),
    ({"text": ["a"] * 100, "sampling_params": {"n": 128}}, "at most 128 items|at most 128 samples"),
    ({**PROMPT, "sampling_params": {"stop_token_ids": [-7]}}, "stop_token_ids"),
    ({**PROMPT, "sampling_params": {"top_k": 2**40}}, "top_k"),
    ({**PROMPT, "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({**PROMPT, "sampling_params": {"n": 10**9}}, "sampling_params.*n: "),
    ({**PROMPT, "sampling_params": {"temperature": -1.0}}, "temperature"),
    ({**PROMPT, "sampling_params": {"regex": "(a*)*b"}}, "regex"),
    ({**PROMPT, "sampling_params": {"logit_bias": {"-5": 1.0}}}, "logit_bias"),
    ({**PROMPT, "return_logprob": True, "token_ids_logprob": [10**9]}, "token_ids_logprob"),
    ({**PROMPT, "return_logprob": True, "top_logprobs_num": 10**9}, "top_logprobs_num"),
]


async def test_a_field_that_reaches_further_or_would_end_the_engine_is_refused_by_name(door: Door) -> None:
    answers = [(words, *await door.ask("POST", "/generate", body)) for body, words in REFUSED]
    assert not [(words, answer) for words, status, answer in answers if status != 400 or not re.search(words, answer["error"])]


async def test_a_chat_brings_text_alone(door: Door) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}
    status, answer = await door.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]})
    assert status == 400 and "messages.0.content" in answer["error"]
    messages = [{"role": "user", "content": "x"}]
    for field, value in (
        ("response_format", {"type": "json_object"}),
        ("lora_path", "/tmp"),
        ("input_ids", [10**9]),
        ("ebnf", "root ::= x"),
    ):
        status, answer = await door.ask("POST", "/v1/chat/completions", {"messages": messages, field: value})
        assert status == 400 and field in answer["error"]


async def test_a_body_that_is_none(door: Door) -> None:
    many = b'{"input_ids": [' + b'"",' * 2_000_000 + b'""]}'  # an error for each would be a gigabyte of them
    fields = json.dumps({f"f{number}": 1 for number in range(300_000)}).encode()
    for data in (many, fields, b"", b"{", b"[]", b'{"text": "\\ud800"}', b'{"text": NaN}', b"[" * 100_000, b'{"input_ids": [1e999]}'):
        status, answer = await door.ask("POST", "/generate", data=data, headers={"Content-Type": "application/json"})
        assert status == 400 and answer["error"]
    for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Content-Encoding": "gzip"}):
        status, _ = await door.ask("POST", "/generate", data=b"{}", headers=headers)
        assert status == 415


@pytest.mark.parametrize("framing", [f"Content-Length: {BODY_BYTES + 1}", "Transfer-Encoding: chunked"])
async def test_a_body_that_is_too_large_is_not_read(framing: str, door: Door) -> None:
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n" if "chunked" in framing else b" " * 0x100000
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(*door.address)
    writer.write(head)
    try:
        for _ in range(64):
            writer.write(chunk)
            await asyncio.wait_for(writer.drain(), 60)
    except ConnectionError:
        pass  # it had closed before it was sent all
    else:
        assert b" 413 " in (await asyncio.wait_for(reader.read(), 60)).split(b"\r\n")[0]
    writer.close()


async def test_a_body_that_does_not_come_has_a_deadline(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.service.engine_load_balancer.BODY_SECONDS", 0.3)
    said = await door.said(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
    assert b" 408 " in said.split(b"\r\n")[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_request_along(stream: bool, door: Door) -> None:
    asking = asyncio.create_task(door.ask("POST", "/generate", {**ENDLESS, "stream": stream}))
    await until(door.busy, "a running request", 120)
    asking.cancel()
    await door.settled()


async def test_no_more_requests_at_once_than_the_limit(door: Door, client: EngineClient) -> None:
    await client.pause("in_place")
    waiting = [asyncio.create_task(door.ask("POST", "/generate", PROMPT)) for _ in range(LIMIT)]
    await until(lambda: door.proxy._requests == LIMIT, "requests in the engine")
    status, answer = await door.ask("POST", "/generate", PROMPT)
    assert status == 429 and "8 requests" in answer["error"]
    await client.resume()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * LIMIT
    assert (await door.ask("POST", "/generate", PROMPT))[0] == 200


async def test_no_more_connections_at_once_than_there_are_descriptors_for(door: Door) -> None:
    """Silent ones, beyond which one is closed at once; the service's own way to the engine is none of them."""
    opened = [await asyncio.open_connection(*door.address) for _ in range(LIMIT + SPARE_CONNECTIONS)]
    reader, writer = await asyncio.open_connection(*door.address)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    await load(door.client)
    for _, other in [*opened, (reader, writer)]:
        other.close()

    async def answers() -> bool:
        try:
            return (await door.ask("GET", "/health"))[0] == 200
        except aiohttp.ClientError:
            return False

    await until(answers, "an answer once they were closed", 60)


async def test_an_answer_has_a_largest_size(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.engine_proxy.ANSWER_BYTES", 100)
    status, answer = await door.ask("POST", "/generate", PROMPT)
    assert status == 502 and "more than 100 bytes" in answer["error"]


async def test_a_fenced_replica_answers_nothing(door: Door) -> None:
    door.served.fence()
    for method, path, body in (("GET", "/health", None), ("GET", "/v1/models", None), ("POST", "/generate", PROMPT)):
        status, answer = await door.ask(method, path, body)
        assert status == 503 and "holds no verified weights" in answer["error"]
    door.served.serve(1, "")
    assert (await door.ask("POST", "/generate", PROMPT))[0] == 200


async def test_requests_wait_while_weights_change(door: Door) -> None:
    door.served.begin_update(1)
    asking = asyncio.create_task(door.ask("POST", "/generate", PROMPT))
    await until(lambda: door.proxy._requests == 1, "a request at the gate")
    assert (await door.ask("GET", "/health"))[0] == 200
    assert (await load(door.client)).running == 0 and not asking.done()
    door.served.serve(1, "")
    assert (await asking)[0] == 200


@pytest.mark.parametrize("ended", [ServedVersion.fence, pytest.param(ServedVersion.engine_died, marks=pytest.mark.extra)])
async def test_what_was_drawn_when_a_replica_was_fenced_is_not_handed_out(ended: Callable[[ServedVersion], None], door: Door) -> None:
    asking = asyncio.create_task(door.ask("POST", "/generate", ENDLESS))
    await until(door.busy, "a running request", 120)
    ended(door.served)
    status, answer = await asking
    assert status == 503 and "became untrusted" in answer["error"]


async def test_a_stream_of_a_fenced_replica_breaks_off(door: Door) -> None:
    host, port = door.address
    async with (
        aiohttp.ClientSession(f"http://{host}:{port}") as session,
        session.post("/generate", json={**ENDLESS, "stream": True}) as answer,
    ):
        await answer.content.readany()
        door.served.fence()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    await door.settled()
