"""One address for the engines of all replicas: where a function that runs in one of them sends its generations, as to slime's router.

Each request goes to the replica with the fewest of this function's in hand, through that replica's own proxy
(`services.rollout.engine_proxy`), which checks it and waits while weights change. Proxies are known from the registry: those of this
machine and those that are open to others. A replica that is gone, fenced or full is passed over while another is there.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from http import HTTPStatus

import aiohttp
from aiohttp import web

from services.rollout.engine_proxy import GENERATIONS, RAW, ROUTES, EndpointServer, RequestDenied, body_of
from services.rollout.replica import Replica
from services.rollout.request_slots import evaluates
from shared.bus.connection import TRANSIENT
from shared.runtime.addresses import LOOPBACK
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import ServiceStatus
from shared.service.service_base import Service
from shared.sessions.session import EVAL_GAUGE

LOOK_SECONDS = 1.0  # the interval at which the registry is read
SPARE_SECONDS = 60.0  # the time beyond a generation's own deadline after which a proxy that says nothing is given up

# What a proxy answers that another may do better.
PASSED_ON = {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY}


def reachable_replicas(statuses: list[ServiceStatus], host: str, least: int) -> list[ServiceStatus]:
    """Returns the replicas whose proxy can be reached from ``host`` and that serve version ``least`` or newer."""
    there = [one for one in statuses if one.engine and one.state == "ready" and one.version >= least]
    return [one for one in there if one.host == host or f"//{LOOPBACK}:" not in one.engine]


class EngineSpread(EndpointServer):
    """The address of one function. ``address``: host and port, once it is open. ``least``: the version that a replica has to serve.
    ``sent``: requests, by proxy."""

    def __init__(self, service: Service, replica: Replica) -> None:
        super().__init__(lambda: web.Server(self._handle, **RAW))
        self._service, self._replica, self.least = service, replica, 0
        self._session: aiohttp.ClientSession | None = None
        self._others: list[ServiceStatus] = []
        self._in_hand: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    async def keep(self) -> None:
        """Is open and follows the registry until cancelled."""
        try:
            await self.open()
            while True:
                await self.look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self.close()

    async def open(self, host: str = LOOPBACK) -> None:
        """Listens on a free port; does nothing if it does so already."""
        await self._replica.open_proxy()
        if self._session is None:  # the proxies bound what is in hand; a request here is one of a function's of this machine
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        await super().open(host)

    async def close(self) -> None:
        """Ends what is being passed on, and listens no more."""
        await super().close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def look(self) -> None:
        """Reads the registry; where it cannot be read, what it said last stands."""
        with contextlib.suppress(MyxoError, *TRANSIENT):
            own = self._service.instance
            others = [one for one in await self._service.registry.alive("rollout") if one.instance != own]
            fleet = bool(evaluates(self._service.config))
            others = [one for one in others if bool(one.gauges.get(EVAL_GAUGE, 0)) == fleet]
            self._others = reachable_replicas(others, self._service.host, self.least)

    @property
    def engines(self) -> int:
        """Returns the number of engines behind the address."""
        return 1 + len(self._others)

    def versions(self) -> tuple[int, int]:
        """Returns the oldest and the newest version that the engines behind the address serve, this replica's among them."""
        found = [self._replica.version, *(other.version for other in self._others)]
        return min(found), max(found)

    def _choice(self, but: set[str]) -> str | None:
        """Returns the proxy with the fewest requests in hand, this replica's own only while it serves or nothing else is there."""
        own = [self._replica.proxy.url] if self._replica.proxy.url else []
        others = [other.engine for other in self._others if other.engine not in but]
        there = others + [url for url in own if url not in but and (self._replica.serving or not others)]
        return min(there, key=lambda url: self._in_hand[url], default=None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            if (request.method, request.raw_path) not in ROUTES:
                raise RequestDenied(HTTPStatus.NOT_FOUND, "this address takes " + ", ".join(sorted(map(" ".join, ROUTES))))
            body = await body_of(request) if request.raw_path in GENERATIONS else None
            return await self._passed_on(request, body)
        except RequestDenied as denied:
            return web.Response(status=denied.status, text=json.dumps({"error": denied.reason}), content_type="application/json")

    async def _passed_on(self, request: web.BaseRequest, body: bytes | None) -> web.StreamResponse:
        tried: set[str] = set()
        denied = RequestDenied(HTTPStatus.SERVICE_UNAVAILABLE, "no replica serves verified weights")
        while (url := self._choice(tried)) is not None:
            tried.add(url)
            try:
                async with self._asked(request, url, body) as answer:
                    if answer.status in PASSED_ON:
                        denied = RequestDenied(HTTPStatus(answer.status), (await answer.text())[:1000])
                        continue
                    return await _copied(request, answer)
            except (aiohttp.ClientError, TimeoutError) as error:
                denied = RequestDenied(HTTPStatus.BAD_GATEWAY, f"{url}: {str(error) or type(error).__name__}")
        raise denied

    @contextlib.asynccontextmanager
    async def _asked(self, request: web.BaseRequest, url: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """Asks a proxy, and counts the request to it meanwhile."""
        assert self._session is not None  # it is open
        config = self._service.config
        seconds = config.rollout.generate_timeout + config.weights.push_timeout + SPARE_SECONDS
        headers = {"Content-Type": "application/json"} if body is not None else {}
        self._in_hand[url] += 1
        self.sent[url] += body is not None
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.request(request.method, url + request.raw_path, data=body, headers=headers, timeout=timeout) as answer:
                yield answer
        finally:
            self._in_hand[url] -= 1


async def _copied(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Returns a proxy's answer, piece by piece as it comes. Once its status has been sent, what breaks off there breaks off here."""
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
    first = await answer.content.readany()  # a proxy that breaks off before it says anything is passed over
    await response.prepare(request)
    try:
        await response.write(first)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionResetError(str(error)) from error
    await response.write_eof()
    return response
