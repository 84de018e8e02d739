"""A real HTTP server on loopback that answers POSTs as a test says, and keeps what it was asked."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import isawaitable
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

    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
