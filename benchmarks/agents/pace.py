"""Tokens per second of conversations: by the engine alone, by a replica's door, and through a gateway.

In each way as many sessions at once have as many turns, of the same prompts and further messages, and each answer has as many tokens in one
way as in the other. Answers differ in length among themselves: were they alike, all sessions would end their turns in the same moment, and
the engine would wait for all their next ones at once. The ways take turns, and the engine forgets its prefixes before each.
"""

import asyncio
import random
import string
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from benchmarks.agents.site import Site, median_of, used_between
from benchmarks.agents.speakers import FORMATS, Said, Speaker, TokenSpeaker, asked
from services.gateway.replicas import GenerationClient
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import GenerationRequest
from shared.schema.messages import Sampling
from shared.sessions.session import Session, TurnRequest, new_key

SESSION_SECONDS = 3600.0

Draw = Callable[[list[int], int], Awaitable[list[int]]]
"""Draws so many tokens after these."""


@dataclass(frozen=True)
class Load:
    """Conversations: ``sessions`` at once, each of ``turns``; ``opening`` and ``further``: tokens that are said; ``drawn``: answered,
    in the mean: from half of that to one and a half times as many."""

    sessions: int
    turns: int
    opening: int
    further: int
    drawn: int

    @property
    def longest(self) -> int:
        """Returns the tokens that the engine reads and draws of a conversation, in the mean."""
        return self.opening + (self.turns - 1) * self.further + self.turns * self.drawn

    @property
    def tokens(self) -> int:
        """Returns how many are drawn in all."""
        return sum(sum(self.answers(number)) for number in range(self.sessions))

    @property
    def sampling(self) -> Sampling:
        """Returns how a session's are drawn; each request says how many."""
        return Sampling(temperature=1.0, max_new_tokens=2 * self.drawn)

    def answers(self, number: int) -> list[int]:
        """Returns the lengths of a conversation's answers, turn by turn: the same at each call."""
        lengths = random.Random(f"answers {number}")
        return [lengths.randint(-(-self.drawn // 2), self.drawn * 3 // 2) for _ in range(self.turns)]

    def texts(self, number: int) -> list[str]:
        """Returns what the user of a conversation says, turn by turn: the same at each call."""
        letters = random.Random(number)
        sizes = [self.opening, *[self.further] * (self.turns - 1)]
        return ["".join(letters.choices(string.ascii_letters, k=size)) for size in sizes]


async def opened(site: Site, load: Load, number: int = 0) -> str:
    """Opens a session, of the group with this number; returns its key."""
    name = uuid.uuid4().hex
    key, digest = new_key(name)
    deadline = time.time() + SESSION_SECONDS
    fields = {"key_digest": digest, "deadline": deadline, "sampling": load.sampling}
    # of an evaluation: in sessions that are trained the task says how few tokens a turn has, and not the client
    session = Session(id=name, group=f"g{number:08}", rollout=0, attempt=0, evaluation=True, **fields)
    await site.sessions.open(session)
    return key


async def through_gateways(site: Site, load: Load, kind: type[Speaker], *, apart: bool = False) -> list[Said]:
    """Holds all conversations through the gateways. ``apart``: each turn is a session of its own, and any replica's."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def held(number: int) -> list[Said]:
            speaker, key, said = kind(load.drawn, True), await opened(site, load, number), []
            url = site.urls[number % len(site.urls)]
            for text, speaker.most in zip(load.texts(number), load.answers(number), strict=True):
                speaker.say(text)
                said.append(await asked(http, url, key, speaker))
                assert said[-1].drawn == speaker.most, "each way draws as many tokens"
                key = await opened(site, load, number) if apart else key
            async with http.post(f"{url}/v1/session/end", json={"reward": 0.0}, headers={"Authorization": f"Bearer {key}"}) as response:
                response.raise_for_status()
            return said

        return [one for some in await asyncio.gather(*map(held, range(load.sessions))) for one in some]


async def by_tokens(load: Load, draw: Draw) -> None:
    """Holds all conversations by token ids."""

    async def held(number: int) -> None:
        speaker = TokenSpeaker(load.drawn, True)
        for text, count in zip(load.texts(number), load.answers(number), strict=True):
            speaker.say(text)
            speaker.tokens += await draw(speaker.tokens, count)

    await asyncio.gather(*map(held, range(load.sessions)))


def exactly(count: int) -> Sampling:
    """Returns how so many tokens are drawn, and no fewer."""
    return Sampling(temperature=1.0, max_new_tokens=count, min_new_tokens=count)


def engine_draw(engine: EngineClient) -> Draw:
    """Draws from the engine itself, as the rollout service does."""

    async def draw(tokens: list[int], count: int) -> list[int]:
        [found] = await engine.generate_group([GenerationRequest(np.asarray(tokens, np.int32), count)], exactly(count))
        assert len(found.tokens) == count, found.finish
        return list(map(int, found.tokens))

    return draw


def door_draw(door: GenerationClient, url: str) -> Draw:
    """Draws at a replica's door, as gateways do."""

    async def draw(tokens: list[int], count: int) -> list[int]:
        ids = np.asarray(tokens, np.int32)
        found = await door.generate(url, TurnRequest(request=uuid.uuid4().hex, input_ids=ids, sampling=exactly(count), seconds=600))
        return list(map(int, found.completion))

    return draw


async def compared(site: Site, url: str, load: Load, repetitions: int) -> dict[str, Any]:
    """Returns the tokens per second of each way, and the ratios to the engine alone: medians over repetitions, and all of them."""
    engine, door = await site.engine(0), GenerationClient(site.sessions)
    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "engine": lambda: by_tokens(load, engine_draw(engine)),
        "door": lambda: by_tokens(load, door_draw(door, url)),
        "gateway, token ids": lambda: through_gateways(site, load, FORMATS["generate"]),
        "gateway, chat": lambda: through_gateways(site, load, FORMATS["chat"]),
    }
    paces: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, dict[str, float]] = {}
    try:
        for repetition in range(-1, repetitions):  # the first is a warm-up
            order = list(ways)
            for name in order if repetition % 2 else reversed(order):
                await engine.transport.post("/flush_cache", None, 30, "nothing is measured")
                before, begun = site.cpu(), time.monotonic()
                await ways[name]()
                if repetition >= 0:
                    paces[name].append(load.tokens / (time.monotonic() - begun))
                    used[name] = used_between(before, site.cpu())
    finally:
        await engine.close()
        await door.close()
    ratios = {name: [own / alone for own, alone in zip(paces[name], paces["engine"], strict=True)] for name in ways if name != "engine"}
    return {
        "load": vars(load),
        "tokens_per_s": {name: round(median_of(found), 1) for name, found in paces.items()},
        "every_repetition": {name: [round(one, 1) for one in found] for name, found in paces.items()},
        "ratio_to_engine": {name: round(median_of(found), 3) for name, found in ratios.items()},
        "every_ratio": {name: [round(one, 3) for one in found] for name, found in ratios.items()},
        "cpu_s": used,
    }


async def oversubscribed(site: Site, url: str, load: Load, repetitions: int) -> dict[str, Any]:
    """Returns the tokens per second of conversations that do not all fit into the engine's memory at once: request by request, as they come
    at a replica's door, and by sessions, which a gateway admits by their tokens; medians, all of them, and the ratios."""
    engine, door = await site.engine(0), GenerationClient(site.sessions)
    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "requests": lambda: by_tokens(load, door_draw(door, url)),
        "sessions": lambda: through_gateways(site, load, FORMATS["generate"]),
    }
    paces: dict[str, list[float]] = {name: [] for name in ways}
    computed = []
    try:
        for repetition in range(-1, repetitions):  # the first is a warm-up
            for name in list(ways) if repetition % 2 else reversed(ways):
                await engine.transport.post("/flush_cache", None, 30, "nothing is measured")
                begun = time.monotonic()
                said = await ways[name]()
                print(
                    f"{time.strftime('%H:%M:%S')} {name}: {load.tokens / (time.monotonic() - begun):,.0f} tokens/s",
                    file=sys.stderr,
                    flush=True,
                )
                if repetition >= 0:
                    paces[name].append(load.tokens / (time.monotonic() - begun))
                    computed += [sum(one.prompt - one.cached for one in said)] if said else []
    finally:
        await engine.close()
        await door.close()
    return {
        "load": vars(load),
        "tokens_per_s": {name: round(median_of(found), 1) for name, found in paces.items()},
        "every_repetition": {name: [round(one, 1) for one in found] for name, found in paces.items()},
        "every_ratio": [round(mine / theirs, 3) for theirs, mine in zip(*paces.values(), strict=True)],
        "prefill_tokens_of_sessions": round(median_of(computed)),
    }


async def prefilled(site: Site, load: Load, repetitions: int, *, apart: bool) -> dict[str, Any]:
    """Returns the tokens per second of conversations in tokens, and how many tokens of prompts the engines had to compute."""
    paces, computed, prompts = [], [], []
    for repetition in range(-1, repetitions):
        for number in range(site.replicas):
            engine = await site.engine(number)
            await engine.transport.post("/flush_cache", None, 30, "nothing is measured")
            await engine.close()
        begun = time.monotonic()
        said = await through_gateways(site, load, FORMATS["generate"], apart=apart)
        if repetition >= 0:
            paces.append(load.tokens / (time.monotonic() - begun))
            computed.append(sum(one.prompt - one.cached for one in said))
            prompts.append(sum(one.prompt for one in said))
    return {
        "tokens_per_s": round(median_of(paces), 1),
        "every_repetition": [round(one, 1) for one in paces],
        "prompt_tokens": round(median_of(prompts)),
        "prefill_tokens": round(median_of(computed)),
    }
