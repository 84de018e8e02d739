"""Serves ``/healthz`` and ``/metrics`` of every service, with FastAPI on uvicorn."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shared.runtime.errors import DeadlineExceeded
from shared.runtime.failures import background


def health_app(health: Callable[[], dict[str, object]], registry: CollectorRegistry) -> FastAPI:
    """Returns the app. ``/healthz`` gives 200 with the service's state while ``health()["ok"]``, else 503; ``/metrics`` metrics as text."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz(response: Response) -> dict[str, object]:
        state = health()
        response.status_code = 200 if state.get("ok") else 503
        return state

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


@contextlib.asynccontextmanager
async def serving(app: FastAPI, address: str, deadline: float = 15.0) -> AsyncIterator[str]:
    """Serves ``app`` at ``host:port`` (port 0: any free one) while the body runs; yields the ``host:port`` that others reach it by."""
    host, _, port = address.rpartition(":")
    config = uvicorn.Config(app, host=host or "127.0.0.1", port=int(port), log_level="warning", access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # the service handles signals itself
    ended = asyncio.Event()

    async def serve() -> None:
        try:
            await server._serve()
        finally:
            ended.set()

    async with background(serve()):
        end = asyncio.get_running_loop().time() + deadline
        while not server.started:
            if ended.is_set() or asyncio.get_running_loop().time() > end:
                raise DeadlineExceeded(f"the HTTP side at {address}", "uvicorn", deadline, "given up")
            await asyncio.sleep(0.02)
        bound = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"{socket.gethostname() if host == '0.0.0.0' else host or '127.0.0.1'}:{bound}"
        finally:
            server.should_exit = True
            server.force_exit = True
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(ended.wait(), timeout=5)
