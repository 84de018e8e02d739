"""Serves ``/healthz`` and ``/metrics`` of every service, with FastAPI on uvicorn."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shared.runtime.failures import background
from shared.runtime.own_address import LOOPBACK, own_address


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
async def serving(app: FastAPI, address: str) -> AsyncIterator[str]:
    """Serves ``app`` at ``host:port`` (port 0: any free one) while the body runs; yields the ``host:port`` that others reach it by."""
    host, _, port = address.rpartition(":")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none"))
    with socket.create_server((host or LOOPBACK, int(port))) as listener:
        async with background(server._serve([listener])):  # not `serve`: the service handles signals itself
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                yield f"{own_address() if host == '0.0.0.0' else host or LOOPBACK}:{listener.getsockname()[1]}"
            finally:
                server.force_exit = True
                await server.shutdown([listener])
