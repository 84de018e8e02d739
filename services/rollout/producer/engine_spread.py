"""One address for the engines of all replicas: where a function that runs in one of them sends its generations, as to slime's router.

Each request goes to the replica with the fewest of this function's in hand, through that replica's own door
(`services.rollout.engine_proxy`), which checks it and waits while weights change. Doors are known from the registry: those of this machine
and those that are open to others. A replica that is gone, fenced or full is passed over while another is there.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from aiohttp import web

from services.rollout.engine_proxy import GENERATIONS, ROUTES, RequestDenied, body_of
from services.rollout.replica import Replica
from shared.bus.connection import TRANSIENT
from shared.runtime.addresses import LOOPBACK
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import ServiceStatus
from shared.service.service_base import Service

LOOK_SECONDS = 1.0
"""The interval at which the registry is read."""

SPARE_SECONDS = 60.0
"""The time beyond a generation's own deadline after which a door that says nothing is given up."""

PASSED_ON = {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY}
"""What a door answers that another may do better."""


@dataclass(frozen=True)
class Door:
    """The way to a replica's engine. ``version``: what the replica serves, as it last said."""

    url: str
    version: int


def doors(statuses: list[ServiceStatus], host: str, least: int) -> list[Door]:
    """Returns the doors that can be reached from ``host``, of replicas that serve version ``least`` or newer."""
    there = [one for one in statuses if one.engine and one.state == "ready" and one.version >= least]
    return [Door(one.engine, one.version) for one in there if one.host == host or f"//{LOOPBACK}:" not in one.engine]


class EngineSpread:
    """The address of one function.

    Attributes:
        address: host and port, once it is open. least: the version that a replica has to serve. sent: requests, by door.
    """

    def __init__(self, service: Service, replica: Replica) -> None:
        self._service, self._replica, self.least = service, replica, 0
        self._runner: web.ServerRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._others: list[Door] = []
        self._in_hand: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.address: tuple[str, int] | None = None

    async def keep(self) -> None:
        """Is open and follows the registry until cancelled."""
        try:
            await self.open()
            while True:
                await self.look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self.close()

    async def open(self) -> None:
        """Listens on a free port of loopback; does nothing if it does so already."""
        await self._replica.open_proxy()
        if self._runner is not None:
            return
        # the doors bound what is in hand; a request here is one of a function's of this machine
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        server = web.Server(self._handle, handler_cancellation=True, access_log=None, auto_decompress=False)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        self.address = self._runner.addresses[0][:2]

    async def close(self) -> None:
        """Ends what is being passed on, and listens no more."""
        if self._runner is not None and self._session is not None:
            await self._runner.cleanup()
            await self._session.close()
            self._runner = self._session = self.address = None

    async def look(self) -> None:
        """Reads the registry; where it cannot be read, what it said last stands."""
        with contextlib.suppress(MyxoError, *TRANSIENT):
            own = self._service.instance
            others = [one for one in await self._service.registry.alive("rollout") if one.instance != own]
            self._others = doors(others, self._service.host, self.least)

    @property
    def engines(self) -> int:
        """Returns the number of engines behind the address."""
        return 1 + len(self._others)

    def versions(self) -> tuple[int, int]:
        """Returns the oldest and the newest version that the engines behind the address serve, this replica's among them."""
        found = [self._replica.version, *(door.version for door in self._others)]
        return min(found), max(found)

    def _choice(self, but: set[str]) -> str | None:
        """Returns the door with the fewest requests in hand, this replica's own only while it serves or nothing else is there."""
        host, port = self._replica.proxy.address or ("", 0)
        own = [f"http://{host}:{port}"] if host else []
        others = [door.url for door in self._others if door.url not in but]
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
                async with self._door(request, url, body) as answer:
                    if answer.status in PASSED_ON:
                        denied = RequestDenied(HTTPStatus(answer.status), (await answer.text())[:1000])
                        continue
                    return await _copied(request, answer)
            except (aiohttp.ClientError, TimeoutError) as error:
                denied = RequestDenied(HTTPStatus.BAD_GATEWAY, f"{url}: {str(error) or type(error).__name__}")
        raise denied

    @contextlib.asynccontextmanager
    async def _door(self, request: web.BaseRequest, url: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """Asks a door, and counts the request to it meanwhile."""
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
    """Returns a door's answer, piece by piece as it comes. Once its status has been sent, what breaks off there breaks off here."""
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
    first = await answer.content.readany()  # a door that breaks off before it says anything is passed over
    await response.prepare(request)
    try:
        await response.write(first)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionResetError(str(error)) from error
    await response.write_eof()
    return response
