"""Clients that ask a real gateway for what it does not serve, or too much of it, and engines whose cache is small."""

import asyncio
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from shared.runtime.tasks import cancelled
from shared.schema.messages import Sampling
from tests.integration.engine.conftest import SMALL_TOKENS, Checkpoints
from tests.integration.engine.hall import Hall, NewHall
from tests.integration.engine.reference import log_probs
from tests.support.gateways import Played
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


ASKED = {"model": "0", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
CHAT, MESSAGES, RESPONSES, TOKENS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"

REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"stop_token_ids": [5, 2_000_000_000]}, "stop_token_ids"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * (31 << 20)}]}, "messages"),
    (RESPONSES, {"messages": None, "max_tokens": None, "input": "x" * 5000}, "input"),
    (RESPONSES, {"messages": None, "max_tokens": None, "input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    (TOKENS, {"messages": None, "max_tokens": None, "token_ids": [5] * 5000}, "token_ids"),
    (TOKENS, {"messages": None, "max_tokens": None, "token_ids": [5, 5000]}, "token_ids"),
]
"""Endpoint, what is asked otherwise than in `ASKED`, and the field that the refusal names."""


class Asker:
    """A session's raw HTTP client."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self._http, self._url, self._key = http, url, key

    async def __call__(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, Any, Any]:
        given = {"Authorization": f"Bearer {self._key}", **headers}
        async with self._http.request(method, self._url + path, json=body, headers=given) as answer:
            return answer.status, await answer.json(), answer.headers


def peak_memory(pid: int) -> int:
    """MiB."""
    return int(next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")).split()[1]) >> 10


@pytest.mark.extra
async def test_what_is_not_served_is_told(hall: NewHall) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    room = await hall()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(room.processes[0].process.pid, resource.RLIMIT_NOFILE) == (hard, hard), "clients may be many"
    one, evaluated = [await room.session(evaluation=kind) for kind in (False, True)]
    async with aiohttp.ClientSession() as http:
        ask, evaluating = (Asker(http, room.urls[0], played.key) for played in (one, evaluated))
        for path, changes, field in REFUSALS:
            body = {name: value for name, value in (ASKED | changes).items() if value is not None}
            status, answer, _ = await ask(path, body)
            assert (status, answer["error"]["param"]) == (400, field), answer
        assert peak_memory(room.processes[0].process.pid) < 2 << 10, "31 MiB of text were not made into tokens"
        assert not (await one.log()).pending, "nothing was begun that cannot be drawn"

        # every refusal has its house's form
        for path, method, status in (("/v1/nothing", "POST", 404), (CHAT, "GET", 405)):
            found = await ask(path, method=method)
            assert (found[0], found[1]["error"]["type"]) == (status, "not_found_error" if status == 404 else "invalid_request_error")
        assert (await ask(MESSAGES + "/nothing"))[1]["error"]["type"] == "not_found_error"
        status, answer, _ = await Asker(http, room.urls[0], "sk-myxo-.gateway-key-" + "0" * 48)(CHAT, ASKED)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), "what is no session is no failure"

        # a name is one request's: asked otherwise under it, another answer comes
        named = {"Idempotency-Key": "mine"}
        first, again = [(await ask(CHAT, ASKED, **named))[1]["id"] for _ in range(2)]
        changed = (await ask(CHAT, ASKED | {"messages": [{"role": "user", "content": "y"}]}, **named))[1]["id"]
        assert first == again != changed

        # nothing is ignored in silence, at whatever depth
        parts = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
        counted = {"model": "0", "messages": [{"role": "user", "content": parts}], "metadata": {"user_id": "x"}}
        assert (await ask(MESSAGES + "/count_tokens", counted))[2]["X-Myxo-Ignored"] == "cache_control, metadata"
        assert (await ask(MESSAGES + "/count_tokens", counted | {"model": "gpt-4o"}))[0] == 404
        kept = {"model": "0", "input": "x", "max_output_tokens": 2, "include": ["reasoning.encrypted_content"]}
        assert (await ask(RESPONSES, kept))[2]["X-Myxo-Ignored"] == "include"
        assert (await evaluating(CHAT, ASKED | {"top_k": 0}))[0] == 200, "all tokens, as elsewhere"

        # a session that has ended does not grow
        assert (await ask("/v1/session/end", {"reward": 1.0}))[0] == 200
        length = (await one.log()).length
        assert [(await ask("/v1/session/end", {"reward": reward}))[0] for reward in (1.0, 2.0, 1.0)] == [200, 409, 200]
        assert (await one.log()).length == length


@pytest.mark.extra
async def test_nothing_is_drawn_for_a_client_that_is_gone(hall: NewHall) -> None:
    """Before a streamed answer has begun, and before any other has come."""
    room = await hall(gateway={"gateway_checkpoint_tokens": 2000})
    endless = Sampling(temperature=1.0, max_new_tokens=1900, min_new_tokens=1900)
    clients = [await room.session(sampling=endless) for _ in range(2)]
    async with aiohttp.ClientSession() as http:
        asks = [Asker(http, room.urls[0], played.key) for played in clients]
        body = {name: value for name, value in ASKED.items() if name != "max_tokens"}
        asking = [asyncio.create_task(ask(CHAT, body | {"stream": stream})) for ask, stream in zip(asks, (True, False), strict=True)]
        await until(lambda: room.desk.client.generating == 2, "both turns in the engine", 240)
        await cancelled(asking)
        await until(lambda: room.desk.client.generating == 0, "an engine that draws for nobody", 60)
    for played in clients:
        assert not (await played.log()).turns, "what was begun has not been drawn to its end"


async def test_what_an_engine_refuses_is_not_asked_for_again(hall: NewHall) -> None:
    """A task's own settings that no engine takes: every replica would say the same, again and again."""
    room = await hall()
    played = await room.session()
    sampling = played.session.sampling.model_copy(update={"top_k": 0})
    wrong = await room.session(sampling=sampling)
    async with aiohttp.ClientSession() as http:
        status, answer, _ = await Asker(http, room.urls[0], wrong.key)(CHAT, ASKED)
    assert status == 400 and "top_k" in answer["error"]["message"]


MOST, SESSIONS, LONG = 32, 32, 400
"""Draws at once, sessions, and tokens of a turn: in all six times what the engine has room for."""


async def turn(played: Played, url: str, text: str) -> int:
    """Plays one turn of an unmodified client. Returns the number of its tokens."""
    async with played.client(url, timeout=600.0, max_retries=0) as client:
        answer = await client.chat.completions.create(model="0", messages=[{"role": "user", "content": text}])
    assert answer.usage is not None
    return answer.usage.completion_tokens


async def wave(room: Hall, sessions: Sequence[Played], tokens: int) -> int:
    """All sessions play a turn at once. Returns how many requests the engine has put back meanwhile."""
    before = room.desk.client._retractions
    drawn = await asyncio.gather(*(turn(one, room.urls[0], f"{number:03}") for number, one in enumerate(sessions)))
    assert set(drawn) == {tokens}, "none was lost, cut short or refused"
    return room.desk.client._retractions - before


async def limit(room: Hall) -> int:
    [status] = await room.registry.alive("gateway")
    return int(status.gauges.get("gateway_generations_most", 0))


def exactly(tokens: int) -> Sampling:
    return Sampling(temperature=1.0, max_new_tokens=tokens, min_new_tokens=tokens)


async def sessions(room: Hall, tokens: int) -> list[Played]:
    return [await room.session(sampling=exactly(tokens)) for _ in range(SESSIONS)]


@pytest.mark.extra
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine_name", ["small_engine"])
async def test_draws_are_fewer_while_an_engine_lacks_memory_and_come_back(hall: NewHall, checkpoint: Checkpoints) -> None:
    assert SESSIONS * LONG > 6 * SMALL_TOKENS
    gateway = {"gateway_replica_requests": MOST, "gateway_wait": 600.0, "gateway_checkpoint_tokens": 2000}
    room = await hall(gateway=gateway)
    await until(lambda: is_limit(room, MOST), "a gateway that gives all places", 60)
    played: list[Played] = []
    put_back: list[int] = []
    while not any(put_back):  # requests that a crowded machine brings one by one wait in the engine's queue, and none is put back
        assert len(put_back) < 5, "memory was never short"
        put_back.append(await wave(room, played := await sessions(room, LONG), LONG))
    await asyncio.sleep(2 * room.desk.service.heartbeat)
    low = await limit(room)
    assert low < MOST
    played += (second := await sessions(room, LONG))
    put_back.append(await wave(room, second, LONG))
    assert max(put_back) <= SESSIONS, "it is no storm"
    low = min(low, await limit(room))

    waves = 0
    while await limit(room) <= low:  # short turns fit: each that ends well while all places are taken is worth a part of one
        await wave(room, await sessions(room, 8), 8)
        waves += 1
        assert waves < 40, "it did not rise"
    print(f"put back: {put_back} of {SESSIONS} requests; limit {MOST} -> {low} -> {await limit(room)} after {waves} waves of short turns")
    for one in played:
        [drawn] = (await one.log()).turns.values()
        expected = log_probs(checkpoint(0).model, drawn.prompt, drawn.completion, banned=[1])
        np.testing.assert_allclose(drawn.log_probs, expected, atol=1e-4)


async def is_limit(room: Hall, wanted: int) -> bool:
    return await limit(room) == wanted
