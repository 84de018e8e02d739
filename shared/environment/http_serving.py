"""Serves an environment over HTTP, in JSON: ``GET /describe``, and ``POST`` for each other verb."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from shared.environment.protocol import DESCRIBE
from shared.environment.serving import EpisodeRefused, ServedEnvironment
from shared.runtime.safe_files import parse_json

MOST_BYTES = 64 << 20
"""The largest request: a group of long responses."""


@asynccontextmanager
async def served_over_http(environment: ServedEnvironment, host: str, port: int) -> AsyncIterator[str]:
    """Serves until left; yields the URL. ``port`` 0: any that is free. Raises OSError where it cannot listen."""

    async def on_request(request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        if (request.method == "GET") != (verb == DESCRIBE):
            return _answer(405, {"error": f"{verb} is asked with {'GET' if verb == DESCRIBE else 'POST'}"})
        try:
            question: Any = {} if verb == DESCRIBE else parse_json(await request.read())
            if not isinstance(question, dict):
                raise EpisodeRefused("expected an object")
            return _answer(200, await environment.answer(verb, question))
        except (EpisodeRefused, ValueError) as error:
            return _answer(400, {"error": str(error)})
        except Exception as error:  # of the user's code
            return _answer(500, {"error": f"{type(error).__name__}: {error}"})

    application = web.Application(client_max_size=MOST_BYTES)
    application.router.add_route("*", "/{verb}", on_request)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0]
        yield f"http://{host}:{bound[1]}"
    finally:
        await runner.cleanup()


def _answer(status: int, value: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=json.dumps(value, allow_nan=False, default=str).encode(), content_type="application/json")
