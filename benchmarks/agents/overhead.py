"""What a gateway adds to a request: its time from the client's side, less the time in the replica.

The replica is one in this process, which answers at once with letters and the token that ends a turn: beside an engine on the same cores
the gateway's time could not be separated from the time for which it waits for a core.
"""

import asyncio
import random
import string
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.agents.pace import Load, opened
from benchmarks.agents.site import Site, used_between
from benchmarks.agents.speakers import FORMATS, Speaker, asked
from shared.runtime.tasks import cancelled
from shared.schema.service_messages import ServiceStatus
from shared.sessions.session import CONTENT_TYPE, CONTEXT_GAUGE, GENERATE_PATH, VOCABULARY_GAUGE, TurnGeneration, TurnRequest

HISTORIES = {"short": Load(1, 3, 60, 40, 32), "long": Load(1, 20, 600, 332, 64)}
"""Conversations by name: of 3 turns and 240 tokens, and of 20 turns and 8,000 tokens."""

CONTEXT = 1 << 17
VOCABULARY = 128


class InstantReplica:
    """A replica without an engine. ``spent``: seconds in it by request. ``end``: the token that ends a turn."""

    def __init__(self, end: int) -> None:
        self.spent: dict[str, float] = {}
        self._end, self._letters = end, random.Random(0)

    async def generate(self, request: web.Request) -> web.Response:
        """Answers a gateway."""
        begun = time.perf_counter()
        asked_for = TurnRequest.decode(await request.read())
        letters = self._letters.choices(string.ascii_letters, k=asked_for.sampling.max_new_tokens - 1)
        completion = np.array([*(1 + ord(letter) - 32 for letter in letters), self._end], np.int32)
        log_probs = np.full(len(completion), -1.5, np.float32)
        drawn = TurnGeneration(completion=completion, log_probs=log_probs, spans=((0, len(completion), 0),), finish="stop")
        answer = web.Response(body=drawn.encode(), content_type=CONTENT_TYPE)
        self.spent[asked_for.request] = time.perf_counter() - begun
        return answer


@asynccontextmanager
async def instant_replica(site: Site, end: int) -> AsyncIterator[InstantReplica]:
    """Serves such a replica and has the registry name it while the body runs."""
    replica, app = InstantReplica(end), web.Application(client_max_size=1 << 28)
    app.router.add_post(GENERATE_PATH, replica.generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    await site.sessions.make_gateway_key()

    async def announce() -> None:
        gauges = {CONTEXT_GAUGE: float(CONTEXT), VOCABULARY_GAUGE: float(VOCABULARY)}
        while True:
            fields: dict[str, Any] = {"host": "127.0.0.1", "pid": 1, "http": "", "engine": url, "state": "ready", "gauges": gauges}
            await site.registry.renew(ServiceStatus(service="rollout", instance="instant", version=0, at=time.time(), **fields))
            await asyncio.sleep(1.0)

    announcing = asyncio.create_task(announce())
    try:
        yield replica
    finally:
        await cancelled([announcing])
        await runner.cleanup()


async def measured(site: Site, replica: InstantReplica, kind: type[Speaker], load: Load, requests: int, at_once: int) -> dict[str, float]:
    """Returns the milliseconds that a gateway adds to a request, and its CPU milliseconds for one."""
    added: list[float] = []
    left = iter(range(max(1, requests // load.turns // at_once) * at_once))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def converse() -> None:
            for number in left:
                speaker, key = kind(load.drawn, False), await opened(site, load)
                for text in load.texts(number):
                    speaker.say(text)
                    begun = time.perf_counter()
                    said = await asked(http, site.urls[0], key, speaker)
                    added.append(time.perf_counter() - begun - replica.spent.pop(said.request))

        before, begun = site.cpu(), time.perf_counter()
        await asyncio.gather(*(converse() for _ in range(at_once)))
        seconds, used = time.perf_counter() - begun, used_between(before, site.cpu())
    p50, p99 = np.percentile(added, [50, 99]) * 1000
    return {
        "requests": len(added),
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "gateway_cpu_ms": round(1000 * used["gateway"] / len(added), 2),
        "store_cpu_ms": round(1000 * used["store"] / len(added), 2),
        "client_cpu_ms": round(1000 * used["clients"] / len(added), 2),
        "requests_per_s": round(len(added) / seconds, 1),
    }


async def by_format(site: Site, end: int, requests: int, at_once: int) -> dict[str, Any]:
    """Returns the figures of each format, with short and with long conversations, one at a time and several at once."""
    found: dict[str, Any] = {}
    async with instant_replica(site, end) as replica:
        for kind in FORMATS.values():  # the first requests of a gateway load what it has not needed before
            await measured(site, replica, kind, HISTORIES["short"], 6, 1)
        for name, kind in FORMATS.items():
            found[name] = {
                f"{history}, {count} at once": await measured(site, replica, kind, load, requests, count)
                for history, load in HISTORIES.items()
                for count in sorted({1, at_once})
            }
    return found
