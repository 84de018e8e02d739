"""A gateway asks less of an engine that lacks memory, and more again when it does not: with an engine whose cache is small."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from shared.schema.messages import Sampling
from tests.integration.engine.conftest import SMALL_TOKENS, Checkpoints
from tests.integration.engine.hall import Hall, NewHall
from tests.integration.engine.reference import log_probs
from tests.support.gateways import Played
from tests.support.waiting import until

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
