"""Requests that keep an engine busy while something is done to it."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import Generation, GenerationRequest
from shared.schema.messages import Sampling
from tests.support.waiting import until

SAMPLING = Sampling(temperature=1.0, max_new_tokens=1)
LONG = 400
"""Output tokens of a request that is to be caught running: seconds, even on a fast machine."""


def prompts(count: int, length: int = 12) -> list[NDArray[np.int32]]:
    """Different prompts of printable characters, the same ones every time."""
    generator = np.random.default_rng(7)
    return [generator.integers(4, 100, length).astype(np.int32) for _ in range(count)]


def requests(count: int, new_tokens: int = LONG) -> list[GenerationRequest]:
    """Requests for exactly ``new_tokens`` each, ids ``r-0``, ``r-1``, …"""
    return [GenerationRequest(tokens, new_tokens, rid=f"r-{number}", ignore_eos=True) for number, tokens in enumerate(prompts(count))]


async def whole(client: EngineClient, request: GenerationRequest) -> Generation:
    """One generation to its own end. An engine may hand a waiting request back before its first token; whoever wants it asks again."""
    for _ in range(5):
        (generation,) = await client.generate_group([replace(request, rid=uuid.uuid4().hex)], SAMPLING)
        if generation.finish != "abort":
            return generation
    raise AssertionError("the engine has handed the request back five times")


@dataclass(frozen=True)
class Load:
    """What an engine is doing, as it counts every few steps: requests in decode and in its queue, tokens in its cache."""

    running: int
    waiting: int
    used_tokens: int


async def asked(client: EngineClient, method: str, path: str) -> Any:
    """What the engine itself answers; a turn of its scheduler has gone by then."""
    deadline = 240
    return await (client.transport.get(path, deadline) if method == "GET" else client.transport.post(path, None, deadline, "nothing"))


async def load(client: EngineClient) -> Load:
    (rank,) = (await asked(client, "GET", "/v1/loads?include=core"))["loads"]
    return Load(rank["num_running_reqs"], rank["num_waiting_reqs"], rank["num_used_tokens"])


async def served_version(client: EngineClient) -> str:
    """The weight version that the engine itself names."""
    return str((await asked(client, "GET", "/model_info"))["weight_version"])


class WeightsState(NamedTuple):
    """What the engine's first rank knows of its weights."""

    version: int
    digest: str
    channels: frozenset[str]


async def weights_state(client: EngineClient) -> WeightsState:
    """What the engine itself knows of its weights."""
    answer = (await client.receivers.ask({"verb": "state"}, 30))[0]
    return WeightsState(answer["version"], answer["digest"], frozenset(answer["channels"]))


@dataclass
class Running:
    """Requests on their way. ``result()`` waits for them to end."""

    requests: list[GenerationRequest]
    task: asyncio.Task[list[Generation]]

    async def result(self) -> list[tuple[NDArray[np.int32], Generation]]:
        """Each request's prompt and what came."""
        generations = await self.task
        return [(np.asarray(asked.tokens), got) for asked, got in zip(self.requests, generations, strict=True)]


@asynccontextmanager
async def generating(client: EngineClient, count: int, new_tokens: int = LONG) -> AsyncIterator[Running]:
    """``count`` long requests that the engine is decoding when the body begins; made anew where they end before they are seen running."""
    running: list[Running] = []

    async def seen() -> bool:
        if not running or running[-1].task.done():
            await until(lambda: resting(client), "an engine without requests")
            asked = requests(count, new_tokens)
            running.append(Running(asked, asyncio.create_task(client.generate_group(asked, SAMPLING))))
        return await decoding(client, count)

    try:
        await until(seen, f"{count} requests in decode")
        yield running[-1]
    finally:
        for one in running:
            one.task.cancel()


async def resting(client: EngineClient) -> bool:
    now = await load(client)
    return now.running == now.waiting == 0


async def decoding(client: EngineClient, count: int) -> bool:
    """Whether ``count`` requests are running, and some tokens long beyond their prompts of 12."""
    now = await load(client)
    return now.running == count and now.used_tokens > count * 16
