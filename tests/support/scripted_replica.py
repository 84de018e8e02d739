"""A replica that plays a script: gateways find it in the registry and ask it as they ask a real one, and what it answers is known.

The script is a function of the prompt's text. Each token has a log-prob of its own, and its turn's second half was sampled by the next
version, as over a push.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web

from shared.bus.registry import Registry
from shared.data.stop_strings import end_across
from shared.data.tokenizer import Tokenizer
from shared.runtime.tasks import cancelled
from shared.schema.service_messages import ServiceStatus
from shared.sessions.session import CONTEXT_GAUGE, GENERATE_PATH, VOCABULARY_GAUGE, TurnGeneration, TurnRequest
from tests.support.http_server import served

CONTEXT = 1 << 20
PIECE = 7
"""Tokens that are sent at once where an answer is streamed."""


@dataclass
class ScriptedReplica:
    """``script``: the text that follows a prompt's text, to a stop string of the request's or without the token that ends a turn;
    ``version``: of all tokens, else of a push in each turn; ``given``: what it sampled, by the request."""

    tokenizer: Tokenizer
    script: Callable[[str], str]
    version: int | None = None
    given: dict[str, tuple[TurnRequest, TurnGeneration]] = field(default_factory=dict)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = TurnRequest.decode(await request.read())
        prompt = self.tokenizer.decode(asked.input_ids.tolist(), skip_special_tokens=False)
        ids = [*self.tokenizer.encode(self.script(prompt)).tolist(), self.tokenizer.eos_id][: asked.sampling.max_new_tokens]
        stopped = end_across([], ids, asked.sampling.stop, self.tokenizer.decode, ends=[self.tokenizer.eos_id])
        ids, finish = ids[:stopped], "length" if stopped is None else "stop"
        log_probs = -np.random.default_rng(len(self.given)).random(len(ids), np.float32)
        middle, version = (len(ids) + 1) // 2, len(self.given)
        spans = ((0, middle, version), (middle, len(ids), version + 1))[: 1 + (len(ids) > 1)]
        spans = spans if self.version is None else ((0, len(ids), self.version),)
        rows = [
            [(value - rank, (token + rank) % self.tokenizer.vocabulary_size) for rank in range(asked.top_count)]
            for value, token in zip(log_probs, ids, strict=True)
        ]
        top = np.asarray(rows, np.float32).ravel()
        arrays = {"completion": np.asarray(ids, np.int32), "log_probs": log_probs, "top_log_probs": top}
        whole = TurnGeneration(**arrays, spans=spans, finish=finish)
        self.given[asked.request] = (asked, whole)
        if not asked.stream:
            return web.Response(body=whole.encode())
        answer = web.StreamResponse()
        await answer.prepare(request)
        for start in range(0, len(ids), PIECE):
            end = min(start + PIECE, len(ids))
            own = tuple((max(a, start) - start, min(b, end) - start, at) for a, b, at in spans if a < end and b > start)
            piece = TurnGeneration(
                completion=whole.completion[start:end],
                log_probs=log_probs[start:end],
                top_log_probs=top[2 * asked.top_count * start : 2 * asked.top_count * end],
                spans=own,
                finish=finish if end == len(ids) else "abort",
            )
            await answer.write(piece.framed())
        return answer


@asynccontextmanager
async def scripted_replica(
    registry: Registry, tokenizer: Tokenizer, script: Callable[[str], str], version: int | None = None
) -> AsyncIterator[ScriptedReplica]:
    """Serves on loopback, and stands in the registry while the body runs."""
    replica = ScriptedReplica(tokenizer, script, version)
    gauges = {CONTEXT_GAUGE: float(CONTEXT), VOCABULARY_GAUGE: float(tokenizer.vocabulary_size)}
    async with served(web.post(GENERATE_PATH, replica.generate)) as url:

        async def announce() -> None:
            while True:
                status = {"service": "rollout", "instance": "rollout-0", "host": "localhost", "pid": 1, "http": url, "engine": url}
                await registry.renew(ServiceStatus(**status, state="ready", version=0, gauges=gauges, at=time.time()))
                await asyncio.sleep(1)

        announcing = asyncio.create_task(announce())
        try:
            yield replica
        finally:
            await cancelled([announcing])
