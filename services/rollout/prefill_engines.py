"""Prefill and decode apart: a decode engine's requests, each of which has its prompt computed by a prefill engine.

SGLang's protocol: both engines get the same request with one *room*. The prefill engine computes the prompt's keys and values and the first
token and sends them to the decode engine, whose answer counts. Each is a replica with pushes, digests and restarts of its own. The decode
engine's service pairs them for every request, so there is nothing between them that could pair versions at will.

Invariant: no answer is handed out whose prompt was computed by another version, or by another load of it, than the decode engine served as
the request was sent. The prefill engine's service waits for that version and confirms afterwards that it served nothing else meanwhile;
what the decode engine begins under a newer one counts as aborted (`services.rollout.engine.generation.without_older_prefix`).
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from services.rollout.engine.engine_client import ABANDON_SECONDS
from services.rollout.engine.transport import EngineError, EngineTransport
from shared.bus.connection import TRANSIENT
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import cancelled
from shared.runtime.telemetry import declare_metrics
from shared.service.engine_load_balancer import GENERATION_PATHS, LOOK_SECONDS, SPARE_SECONDS, probed_connector
from shared.service.service_base import Service
from shared.sessions.session import KEY_HEADER

PREFILL_PATH, VERSION_HEADER = "/prefill", "X-Myxo-Version"  # the path goes before the engine's own
ROOM_BITS = 62  # a room is a positive int64, and the requests of a group have it and those that follow
TRIES, RETRY_SECONDS, BROKEN = 5, 0.2, 500  # tries of a request, the pause after the first, and the least status of an engine's own fault
ANSWER_SECONDS = 5.0  # the time by which a prefill engine's answer may be later than the decode engine's
AVOIDED_SECONDS = 10.0  # the time for which a prefill engine that has failed is asked only where no other is there

declare_metrics("""
    prefills_failed_total | requests | of a decode engine whose prompts
        [a prefill engine](several-models.md#prefill-and-decode-apart) did not compute, or by other weights: they are tried again
""")


class PrefillEngines:
    """The prefill engines of a service's model, by the registry. ``version``: returns what the decode engine serves. ``key``: the
    gateways', by which they know this run's services."""

    def __init__(self, service: Service, version: Callable[[], int]) -> None:
        self._service, self.version, self.key = service, version, ""
        self.known: dict[str, str] = {}  # address → instance
        self._in_hand: Counter[str] = Counter()
        self._failed: dict[str, float] = {}  # address → until when it is avoided
        self.session: aiohttp.ClientSession | None = None

    async def keep(self) -> None:
        """Follows the registry until cancelled; where it cannot be read, what it said last stands."""
        config = self._service.config
        timeout = aiohttp.ClientTimeout(total=config.rollout.generate_timeout + config.weights.push_timeout + SPARE_SECONDS)
        async with aiohttp.ClientSession(connector=probed_connector(), timeout=timeout) as self.session:
            while True:
                with contextlib.suppress(MyxoError, *TRANSIENT):
                    alive = await self._service.registry.alive(self._service.name)
                    self.known = {one.prefill: one.instance for one in alive if one.prefill and one.model == self._service.model}
                await asyncio.sleep(LOOK_SECONDS)

    @asynccontextmanager
    async def chosen(self, where: str) -> AsyncIterator[str]:
        """Yields the address of the one with the fewest requests in hand. Raises EngineError where there is none."""
        now = asyncio.get_running_loop().time()
        order = sorted(self.known, key=lambda address: (self._failed.get(address, now) > now, self._in_hand[address]))
        if not order:
            raise EngineError(where, "there is no prefill engine with verified weights")
        self._in_hand[order[0]] += 1
        try:
            yield order[0]
        finally:
            self._in_hand[order[0]] -= 1

    async def prefill(self, address: str, path: str, body: bytes, version: int) -> None:
        """Has an engine compute the prompts of a request and send their keys and values. Raises EngineError, which names it."""
        assert self.session is not None  # some are known
        url, name = address.partition("#")[0], self.known.get(address, "")
        headers = {KEY_HEADER: self.key, VERSION_HEADER: str(version), "Content-Type": "application/json"}
        try:
            async with self.session.post(f"{url}{PREFILL_PATH}{path}", data=body, headers=headers) as answer:
                if answer.ok:
                    return
                reason, status = (await answer.text())[:1000], answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            reason, status = str(error) or type(error).__name__, None
        if status != HTTPStatus.CONFLICT:  # its weights, or this engine's, are being changed
            now = asyncio.get_running_loop().time()
            if self._failed.get(address, now) <= now:  # those that were sent to it before fail as well
                self._service.log.warning("prefill_failed", engine=name, error=reason)
            self._failed[address] = now + AVOIDED_SECONDS
        self._service.metrics.add("prefills_failed")
        raise EngineError(f"{url} (prefill, {name})", reason, status)


class DecodeTransport(EngineTransport):
    """The way to a decode engine: what generates goes to a prefill engine, too, and to another one where keys and values did not come."""

    pairs = True

    def __init__(self, where: Path | str, engines: PrefillEngines) -> None:
        super().__init__(where)
        self._engines = engines
        self._waiting: dict[str, bool] = {}  # ids of samples whose prompts are being computed → whether their caller has them aborted

    @asynccontextmanager
    async def stream(self, path: str, data: bytes | None, method: str = "POST") -> AsyncIterator[aiohttp.ClientResponse]:
        """As `EngineTransport.stream`. Raises EngineError, too, where in `TRIES` tries no prefill engine has computed the prompt by the
        version that is served, or the caller has it aborted meanwhile."""
        if data is None or path not in GENERATION_PATHS:
            if data is not None and path == "/abort_request":
                body = orjson.loads(data)
                for rid in self._waiting:
                    self._waiting[rid] |= bool(body.get("abort_all")) or rid.startswith(body.get("rid") or rid + "$")
            async with super().stream(path, data, method) as response:
                yield response
            return
        rids, handed = rids_of(orjson.loads(data)), False
        self._waiting |= dict.fromkeys(rids, False)
        try:
            for tries in range(1, TRIES + 1):
                try:
                    async with self._tried(path, data, rids) as response:
                        handed = True
                        yield response
                        return
                except EngineError:
                    if handed or tries == TRIES or any(self._waiting[rid] for rid in rids):
                        raise
                await asyncio.sleep(RETRY_SECONDS * tries)
        finally:
            for rid in rids:
                self._waiting.pop(rid, None)

    @asynccontextmanager
    async def _tried(self, path: str, data: bytes, rids: list[str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request to both engines, and yields the decode engine's answer once the other one's is there."""
        async with self._engines.chosen(self.url + path) as address:
            parts = urlsplit(address)
            room = {"bootstrap_host": parts.hostname, "bootstrap_port": int(parts.fragment), "bootstrap_room": secrets.randbits(ROOM_BITS)}
            both = data[:-1] + b"," + orjson.dumps(room)[1:]
            prefilling = asyncio.create_task(self._prefill(address, path, both, rids))
            try:
                async with super().stream(path, both) as response:
                    # the status of a stream comes before its first token, and an engine that misses keys and values does not wait for more
                    late = None if response.content_type == "text/event-stream" else 0.0 if response.status >= BROKEN else ANSWER_SECONDS
                    await asyncio.wait([prefilling], timeout=late)
                    if prefilling.done():
                        prefilling.result()
                    if response.status >= BROKEN:
                        raise EngineError(self.url + path, (await response.text())[:1000], response.status)
                    if not prefilling.done() and response.ok:
                        raise EngineError(f"{address} (prefill)", f"it has not answered {ANSWER_SECONDS:g} s after the decode engine")
                    yield response
            finally:
                await cancelled([prefilling])

    async def _prefill(self, address: str, path: str, body: bytes, rids: list[str]) -> None:
        try:
            await self._engines.prefill(address, path, body, self._engines.version())
        except EngineError:  # the decode engine would wait for what never comes
            for rid in rids:
                with contextlib.suppress(MyxoError):
                    async with asyncio.timeout(ABANDON_SECONDS), super().stream("/abort_request", orjson.dumps({"rid": rid})) as answer:
                        await answer.read()
            raise


def rids_of(body: dict[str, Any]) -> list[str]:
    """Returns the ids of a request's samples, as the engine knows them."""
    return list(rids) if isinstance(rids := body["rid"], list) else [rids]


def was_aborted(answer: Any) -> bool:
    """Returns whether an engine has aborted a request of an answer, of whatever kind."""
    if isinstance(answer, list):
        return any(map(was_aborted, answer))
    choices = answer.get("choices", ())
    ends = [choice.get("finish_reason") for choice in choices] or [(answer["meta_info"].get("finish_reason") or {}).get("type")]
    return "abort" in ends
