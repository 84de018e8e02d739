"""One address for the engines of a model: where functions of the user's send their generations, as to slime's router.

The policy's is in a replica and belongs to one function: each request goes to the replica with the fewest of this function's in hand,
through that replica's own proxy (`services.rollout.engine_proxy`), which checks it and waits while weights change. Frozen models have
one in each service that runs functions (`model_routers`). Proxies are known from the registry: those of this machine and those that are
open to others. A replica that is gone, fenced or full is passed over while another is there.
"""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from shared.bus.connection import TRANSIENT
from shared.bus.registry import MODEL
from shared.config.environment_variables import ROUTERS_VARIABLE
from shared.runtime.addresses import LOOPBACK
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import ServiceStatus
from shared.service.service_base import Service
from shared.sessions.session import EVAL_GAUGE

LOOK_SECONDS = 1.0  # the interval at which the registry is read
SPARE_SECONDS = 60.0  # the time beyond a generation's own deadline after which a proxy that says nothing is given up

# What a proxy answers that another may do better.
PASSED_ON = {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY}

# What is passed on, by method and path, to the letter. A path is never decoded or normalised: one that would have to be is not here.
GENERATION_PATHS = ("/generate", "/v1/chat/completions")
ROUTES = {("GET", "/health"), ("GET", "/v1/models"), *(("POST", path) for path in GENERATION_PATHS)}
BODY_BYTES, BODY_SECONDS = 8 * 2**20, 30.0  # the largest body of a request, of a million tokens, and the time that it has to come
SHUTDOWN_SECONDS = 0.1  # the time in which requests may still end when an endpoint is closed


class RequestDenied(Exception):
    """A request that is answered here: it is not passed on, or its answer is not."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


def probed_connector() -> aiohttp.TCPConnector:
    """Returns a client's connections, which break within half a minute where the other machine is gone: of that no word comes."""
    return aiohttp.TCPConnector(limit=0, socket_factory=_probed)


def _probed(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_USER_TIMEOUT, 30_000)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


RAW: dict[str, Any] = {"handler_cancellation": True, "access_log": None, "auto_decompress": False}


class EndpointServer:
    """An HTTP server on a free port, which may be opened more than once. ``make``: makes the server. ``address``: host and port, once it is
    open."""

    def __init__(self, make: Callable[[], web.Server]) -> None:
        self._make, self._opening = make, asyncio.Lock()
        self._runner: web.ServerRunner | None = None
        self.address: tuple[str, int] | None = None

    @property
    def url(self) -> str:
        """Returns where it listens; empty while it does not."""
        return "" if self.address is None else f"http://{self.address[0]}:{self.address[1]}"

    async def open(self, host: str) -> None:
        """Listens on a free port of ``host``; does nothing if it does so already."""
        async with self._opening:  # groups ask for it at once
            if self._runner is None:
                self._runner = web.ServerRunner(self._make(), shutdown_timeout=SHUTDOWN_SECONDS)
                await self._runner.setup()
                await web.TCPSite(self._runner, host, 0).start()
                self.address = self._runner.addresses[0][:2]

    async def close(self) -> None:
        """Ends what is being passed on, and listens no more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = self.address = None


PAUSE_SECONDS, LONGEST_PAUSE = 0.2, 2.0  # after a replica's first failure, and after many in a row


class FailedReplicas:
    """Replicas that have just failed a request: each comes last, and pauses for a time that doubles with each failure that follows, so that
    an engine that has died is asked once in a while until its replica is fenced, however many requests wait for it."""

    def __init__(self) -> None:
        self._pauses: dict[str, tuple[float, float]] = {}  # replica → when its pause ends, monotonic, and how long it is

    def avoid(self, replica: str) -> None:
        """Notes that it has failed. Requests that fail within its pause were sent before, and count once."""
        now, (end, pause) = time.monotonic(), self._pauses.get(replica, (0.0, 0.0))
        if now >= end:
            self._pauses[replica] = now + (longer := min(max(PAUSE_SECONDS, 2 * pause), LONGEST_PAUSE)), longer

    def answered(self, replica: str) -> None:
        """Notes that it has answered."""
        self._pauses.pop(replica, None)

    def pausing(self, replica: str) -> bool:
        """Returns whether it is to get no request at all."""
        return time.monotonic() < self._pauses.get(replica, (0.0, 0.0))[0]

    def __contains__(self, replica: object) -> bool:
        return time.monotonic() < self._pauses.get(str(replica), (0.0, 0.0))[0] + LONGEST_PAUSE


class OwnReplica(Protocol):
    """The replica that an address is in. ``proxy``: where its engine is asked; ``serving``, ``version``: of its weights."""

    @property
    def proxy(self) -> EndpointServer: ...

    @property
    def serving(self) -> bool: ...

    @property
    def version(self) -> int: ...

    async def open_proxy(self) -> None: ...


class EngineSpread(EndpointServer):
    """The address of one function, or of a frozen ``model``. ``address``: host and port, once it is open. ``least``: the version that a
    replica has to serve. ``sent``: requests, by proxy. ``fleet``: whether the policy's engines are those that evaluate alone.

    Where no replica of a frozen model can answer, a request waits for one, for the run's patience: its weights are the same
    after an engine's death."""

    def __init__(self, service: Service, replica: OwnReplica | None, *, model: str = "", fleet: bool = False) -> None:
        super().__init__(lambda: web.Server(self._handle, **RAW))
        self._service, self._replica, self._model, self._fleet, self.least = service, replica, model, fleet, 0
        self._session: aiohttp.ClientSession | None = None
        self._others: list[ServiceStatus] = []
        self._in_hand: Counter[str] = Counter()
        self._failed = FailedReplicas()
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
        if self._replica is not None:
            await self._replica.open_proxy()
        if self._session is None:  # the proxies bound what is in hand; a request here is one of a function's of this machine
            self._session = aiohttp.ClientSession(connector=probed_connector(), auto_decompress=False)
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
            others, own = await self._service.registry.alive(MODEL if self._model else "rollout"), self._service.instance
            others = [one for one in others if one.model == self._model]
            if not self._model:
                others = [one for one in others if one.instance != own and bool(one.gauges.get(EVAL_GAUGE, 0)) == self._fleet]
            there = [one for one in others if one.engine and one.state == "ready" and one.version >= self.least]
            self._others = [one for one in there if one.host == self._service.host or f"//{LOOPBACK}:" not in one.engine]

    @property
    def engines(self) -> int:
        """Returns the number of engines behind the address."""
        return (self._replica is not None) + len(self._others)

    def versions(self) -> tuple[int, int]:
        """Returns the oldest and the newest version that the engines behind the address serve, this replica's among them."""
        found = [*([] if self._replica is None else [self._replica.version]), *(other.version for other in self._others)]
        return min(found), max(found)

    def _choice(self, but: set[str]) -> str | None:
        """Returns the proxy with the fewest requests in hand, those that have just failed last, for they have none; this replica's own only
        while it serves or nothing else is there."""
        replica, others = self._replica, [one.engine for one in self._others if one.engine not in but and one.version >= self.least]
        own = [replica.proxy.url] if replica is not None and replica.proxy.url and (replica.serving or not others) else []
        there = others + [url for url in own if url not in but]
        return min(there, key=lambda url: (url in self._failed, self._in_hand[url]), default=None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            if (request.method, request.raw_path) not in ROUTES:
                raise RequestDenied(HTTPStatus.NOT_FOUND, "this address takes " + ", ".join(sorted(map(" ".join, ROUTES))))
            body = await body_of(request) if request.raw_path in GENERATION_PATHS else None
            return await self._answered(request, body)
        except RequestDenied as denied:
            return web.Response(status=denied.status, text=json.dumps({"error": denied.reason}), content_type="application/json")

    async def _answered(self, request: web.BaseRequest, body: bytes | None) -> web.StreamResponse:
        """Returns a replica's answer; of a frozen model's, the first one within the run's patience."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (self._service.config.rollout.patience if self._model and body is not None else 0.0)
        while True:
            try:
                return await self._passed_on(request, body)
            except RequestDenied as denied:
                if loop.time() + LOOK_SECONDS >= end:
                    raise
                self._service.log.debug("model_waited_for", model=self._model, reason=denied.reason)
            await asyncio.sleep(LOOK_SECONDS)

    async def _passed_on(self, request: web.BaseRequest, body: bytes | None) -> web.StreamResponse:
        tried: set[str] = set()
        lacking = f"no replica of {self._model} is there" if self._model else "no replica serves verified weights"
        denied = RequestDenied(HTTPStatus.SERVICE_UNAVAILABLE, lacking)
        while (url := self._choice(tried)) is not None:
            tried.add(url)
            try:
                async with self._asked(request, url, body) as answer:
                    if answer.status in PASSED_ON:
                        denied = RequestDenied(HTTPStatus(answer.status), (await answer.text())[:1000])
                        self._failed.avoid(url)
                        continue
                    self._failed.answered(url)
                    return await _copied(request, answer)
            except (aiohttp.ClientError, TimeoutError) as error:
                denied = RequestDenied(HTTPStatus.BAD_GATEWAY, f"{url}: {str(error) or type(error).__name__}")
                self._failed.avoid(url)
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


async def body_of(request: web.BaseRequest, kind: str = "application/json", most: int = BODY_BYTES) -> bytes:
    """Returns the whole body. A form of another site's cannot be sent as JSON, so no browser is made to ask an engine on loopback."""
    if request.content_type != kind or request.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestDenied(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"expected a body of {kind}, not compressed")
    if (request.content_length or 0) > most:
        raise RequestDenied(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected a body of at most {most} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > most:
                    raise RequestDenied(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected a body of at most {most} bytes")
    except TimeoutError:
        raise RequestDenied(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_SECONDS:g} s") from None
    return bytes(body)


@contextlib.asynccontextmanager
async def model_routers(service: Service) -> AsyncIterator[None]:
    """Opens an address for each frozen model of the run while the body runs, for this machine's processes: workers of functions find them
    in ``args.sglang_model_routers``, and a teacher that names a model is asked there."""
    config = service.config
    routers = {name: EngineSpread(service, None, model=name) for name in config.rollout.models}
    for router in routers.values():
        await router.open()
    os.environ[ROUTERS_VARIABLE] = json.dumps({name: router.address for name, router in routers.items()})
    teachers = {name: routers[given].url if given in routers else given for name, given in config.algorithm.opd_teachers.items()}
    service.config = config.with_fields(algorithm={"opd_teachers": teachers})
    async with service.background(*(router.keep() for router in routers.values())):
        yield
