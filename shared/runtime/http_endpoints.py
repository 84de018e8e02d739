"""Serves ``/healthz`` and ``/metrics`` of every service, with Starlette on uvicorn.

Not with FastAPI, which a service that has no other page need not import: it takes as long as a fifth of such a service's start.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from shared.runtime.addresses import PRIVATE, HttpAddress, chosen_by, own_address
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import background

HEAD_SECONDS = 15.0  # The time that the head of a request has to come, from its connection or from its first byte


class PunctualProtocol(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
    """uvicorn's protocol, which by itself waits for the rest of a head for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel()
        elif self._late is None:
            self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel()
        super().connection_lost(error)

    def _await_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def health_app(health: Callable[[], dict[str, object]], registry: CollectorRegistry) -> Starlette:
    """Returns the app. ``/healthz`` gives 200 with the service's state while ``health()["ok"]``, else 503; ``/metrics`` metrics as text."""

    async def healthz(_: Request) -> Response:
        state = health()
        return JSONResponse(state, 200 if state.get("ok") else 503)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/healthz", healthz), Route("/metrics", metrics)])


@contextlib.asynccontextmanager
async def serving(app: Starlette, address: HttpAddress, grace_s: float = 0.0) -> AsyncIterator[str]:
    """Serves ``app`` while the body runs; yields the ``host:port`` that others reach it by. Raises ConfigError where it cannot.

    Args:
        grace_s: seconds for requests in hand to be answered afterwards; new ones are not taken then.
    """
    if address.host == PRIVATE:
        address = HttpAddress(own_address(), address.port)
    server = uvicorn.Server(uvicorn.Config(app, http=PunctualProtocol, log_level="warning", access_log=False, lifespan="off", ws="none"))
    with _listener(address) as listener:
        async with background(server._serve([listener])):  # not `serve`: the service handles signals itself
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                yield str(HttpAddress(own_address() if address.wildcard else address.host, listener.getsockname()[1]))
            finally:
                server.force_exit = not grace_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s or None):
                        await server.shutdown([listener])


def _listener(address: HttpAddress) -> socket.socket:
    try:
        listener = socket.create_server(address, family=socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        # connections inherit it; asyncio sets it for sockets of other origin alone. Else a body waits 40 ms for its head's acknowledgement
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ConfigError(chosen_by(), str(address), f"cannot be listened at: {error.strerror or error}") from None
