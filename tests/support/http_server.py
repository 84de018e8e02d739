"""Real HTTP servers on loopback: of routes, and one that answers POSTs as a test says and keeps what it was asked."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import isawaitable
from pathlib import Path
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any], int], Any]
"""(what is asked, which request it is from 0) → JSON, or a whole response."""


@dataclass
class HttpServer:
    """``asked``: the bodies of all requests, in order; ``headers``: their headers."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@asynccontextmanager
async def http_server(answer: Answer, port: int = 0) -> AsyncIterator[HttpServer]:
    """Serves on a port of loopback; 0: a free one."""
    server = HttpServer()

    async def handle(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        number = len(server.asked)
        server.asked.append(body)
        server.headers.append(dict(request.headers))
        given = answer(body, number)
        given = await given if isawaitable(given) else given
        return given if isinstance(given, web.StreamResponse) else web.json_response(given)

    async with served(web.post("/{path:.*}", handle), port=port) as server.url:
        yield server


@asynccontextmanager
async def served(*routes: web.RouteDef, port: int = 0, socket: Path | None = None, shutdown_timeout: float = 60.0) -> AsyncIterator[str]:
    """Serves these routes on a port of loopback (0: a free one), or at a socket's path; yields the URL or the path."""
    application = web.Application(client_max_size=64 << 20)
    application.add_routes(routes)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=shutdown_timeout)
    await runner.setup()
    try:
        await (web.UnixSite(runner, str(socket)) if socket else web.TCPSite(runner, "127.0.0.1", port)).start()
        yield str(socket) if socket else f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
