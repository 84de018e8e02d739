"""What the rollout service asks of an engine, and gets: the same of SGLang and of the chaos suite's scripted one."""

import asyncio
import itertools

import numpy as np

from services.rollout.engine.engine_client import EngineClient, PauseMode
from services.rollout.engine.generation import Generation, GenerationRequest, Span
from shared.schema.messages import Sampling
from tests.support.waiting import until
from tests.support.weights_group import Pusher, Tensors

SAMPLING = Sampling(temperature=1.0, max_new_tokens=1)
SHORT, LONG, TOP = 12, 300, 5

_NUMBERS = itertools.count()


def requests(count: int, new_tokens: int, top: int = 0) -> list[GenerationRequest]:
    """Requests for exactly so many tokens, each with a prompt and an id of its own. ``top``: and the likeliest at each place."""
    return [
        GenerationRequest(
            np.arange(10 + index, 18 + index, dtype=np.int32),
            new_tokens,
            rid=f"contract-{next(_NUMBERS)}",
            ignore_eos=True,
            top_count=top,
        )
        for index in range(count)
    ]


async def assert_engine(client: EngineClient, weights: Tensors) -> None:
    """Asserts all of it of an engine that serves version 0 and is idle. ``weights``: what it can be pushed as version 1 and 2."""
    assert client.capabilities.ranks == 1 and client.capabilities.max_sequence >= LONG + SHORT
    await assert_whole_groups(client, 0)
    await assert_abort(client)
    await assert_pause_with_abort(client)
    await assert_pushes(client, weights)
    await assert_whole_groups(client, 2)


async def assert_whole_groups(client: EngineClient, version: int) -> None:
    """Each request comes back whole, in its place, with a log-prob a token and the version that has drawn it, and the likeliest tokens."""
    asked = requests(3, SHORT, TOP)
    for generation in await client.generate_group(asked, SAMPLING):
        assert len(generation.tokens) == len(generation.log_probs) == SHORT
        assert generation.spans == (Span(0, SHORT, version),)
        assert generation.finish == "length"
        assert (generation.log_probs <= 0).all()
        log_probs, ids = np.moveaxis(generation.top_log_probs.reshape(SHORT, TOP, 2), -1, 0)
        assert (np.diff(log_probs) <= 0).all() and all(len(set(row)) == TOP for row in ids.tolist())
        assert (log_probs[:, 0] >= generation.log_probs).all()
        drawn = ids == generation.tokens[:, None]
        np.testing.assert_array_equal(log_probs[drawn], generation.log_probs[drawn.any(1)])
        assert ((generation.tokens >= 0) & (generation.tokens < client.capabilities.vocab_size)).all()


async def assert_abort(client: EngineClient) -> None:
    """An aborted request comes back with what it has, the other continues."""
    aborted, other = requests(2, LONG)
    task = asyncio.create_task(client.generate_group([aborted, other], SAMPLING))
    await drawing(client)
    await client.abort([aborted.rid])
    partial, whole = await task
    assert partial.finish == "abort" and 0 < len(partial.tokens) < LONG
    assert whole.finish == "length" and len(whole.tokens) == LONG


async def assert_pause_with_abort(client: EngineClient) -> None:
    """Everything that runs ends with what it has; what is asked meanwhile waits for the end of the pause."""
    task = asyncio.create_task(client.generate_group(requests(2, LONG), SAMPLING))
    await drawing(client)
    await client.pause("abort")
    partials = await task
    assert all(partial.finish == "abort" and 0 < len(partial.tokens) < LONG for partial in partials)
    waiting = asyncio.create_task(client.generate_group(requests(1, SHORT), SAMPLING))
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done, "a request was answered during a pause"
    await client.resume()
    (generation,) = await waiting
    assert len(generation.tokens) == SHORT


async def assert_pushes(client: EngineClient, weights: Tensors) -> None:
    """A push in a pause leaves running requests in their places; their spans tell which tokens each version drew."""
    async with Pusher.over(client, names=[f"contract-{next(_NUMBERS)}"]) as pusher:
        modes: tuple[PauseMode, ...] = ("in_place", "retract")
        for version, mode in enumerate(modes, start=1):
            task = await paused(client, mode)
            (received,) = await pusher.push(weights, version)
            assert received.digest == pusher.digest
            await client.resume()
            for generation in await task:
                assert_spans(generation, version)
            (state,) = await client.receivers.ask({"verb": "state"}, 30)
            assert (state["version"], state["digest"]) == (version, pusher.digest)


async def paused(client: EngineClient, mode: PauseMode) -> "asyncio.Task[list[Generation]]":
    """Pauses the engine in the middle of a group: anew where the group has ended before, as on a slow machine."""
    while True:
        task = asyncio.create_task(client.generate_group(requests(2, LONG), SAMPLING))
        await drawing(client)
        await client.pause(mode)
        if not (await asyncio.wait({task}, timeout=0.2))[0]:
            return task
        await client.resume()


def assert_spans(generation: Generation, version: int) -> None:
    """Asserts that a request that ran across a push has tokens of both versions, and nothing between them."""
    before, after = generation.spans
    assert (before.start, before.version) == (0, version - 1)
    assert (after.end, after.version) == (LONG, version)
    assert 0 < before.end == after.start < LONG
    assert generation.finish == "length"


async def drawing(client: EngineClient) -> None:
    """Returns once the engine draws tokens of all that was asked just now: it takes new requests in before it goes on."""
    before = await client.generated_tokens() or 0

    async def drawn() -> bool:
        return (await client.generated_tokens() or 0) > before + LONG // 8

    await until(drawn, "the drawing of tokens", pause=0.01)
