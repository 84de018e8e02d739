"""Environments over HTTP, in JSON: the client, and a server: ``GET /describe``, and ``POST`` for each other verb, below one URL.

The client does not trust the environment: no redirect is followed, no proxy and no netrc of this process's environment is used, no cookie
is stored; a name is resolved once for each connection, and only the checked addresses are connected to; an answer is read up to a limit.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from shared.environment.environment_url import EnvironmentUrl, blocked
from shared.environment.protocol import DESCRIBE, MAX_ANSWER, Environment, EnvironmentAway, EnvironmentFailed, words
from shared.environment.serving import EpisodeRefused, ServedEnvironment, plain
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.safe_files import parse_json

CONNECT_SECONDS = 3.0  # The seconds that resolving and connecting may take before the environment counts as unreachable
# Idle connections are closed after this: the usual servers close theirs after 5 s, and a request sent into that moment would be lost
IDLE_SECONDS = 3.0


class BlockedAddress(Exception):
    """A name resolves to a blocked address."""


class CheckedResolver(ThreadedResolver):
    """The system's resolver, whose answers are checked; what it returns is what gets connected to."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        for one in found:
            if why := blocked(one["host"]):
                raise BlockedAddress(f"{host} resolves to {one['host']}, {why}, which is never connected to")
        return found


def open_session(connections: int, connect_seconds: float | None = None) -> aiohttp.ClientSession:
    """Returns a session of at most so many connections, 0 for any number, to servers that are not trusted."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=IDLE_SECONDS, use_dns_cache=False, resolver=CheckedResolver()),
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},  # else aiohttp asks for what it then does not decompress
    )


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body of an answer; of one that is over `MAX_ANSWER` bytes one byte more than that, and closes it."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER:
            response.close()
            break
    return bytes(body[: MAX_ANSWER + 1])


class JsonServer:
    """Requests in JSON to a server that is not trusted. ``label``: its name in errors. ``connections``: at once, others wait; 0: any."""

    def __init__(self, label: str, url: str, connections: int, connect_seconds: float | None = None) -> None:
        self.label, self.url, self._limits = label, URL(url), (connections, connect_seconds)
        self._session: aiohttp.ClientSession | None = None

    def encoded(self, body: object) -> bytes:
        """Returns a request's body. Raises EnvironmentFailed for what JSON does not have."""
        try:
            return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFailed(self.label, f"the request does not go into JSON: {error}") from error

    async def exchange(self, method: str, url: URL, data: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes, str]:
        """Returns status, body, of which one byte over the limit is read at most, and content type. Raises BlockedAddress, and aiohttp's
        errors."""
        if why := blocked(self.url.host or ""):
            raise BlockedAddress(f"{self.url.host} is {why}, which is never connected to")
        self._session = self._session or open_session(*self._limits)
        own = {"Accept": "application/json", "User-Agent": "myxo", **({} if data is None else {"Content-Type": "application/json"})}
        async with self._session.request(method, url, data=data, headers={**own, **headers}, allow_redirects=False) as response:
            return response.status, await read_body(response), response.headers.get("Content-Type", "")

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()


class HttpEnvironment(Environment):
    """``GET /describe``, and ``POST`` for each other verb, below one URL."""

    def __init__(self, name: str, address: EnvironmentUrl) -> None:
        super().__init__(name, address.shown)
        self._server = JsonServer(self.label, address.url, 0, CONNECT_SECONDS)  # the service limits the requests in flight

    async def ask(self, verb: str, question: dict[str, Any] | None, deadline: float) -> object:
        data, method = (None, "GET") if question is None else (self._server.encoded(question), "POST")
        try:
            async with asyncio.timeout(deadline):
                url = self._server.url / verb
                status, answer, self.content_type = await self._server.exchange(method, url, data, {})
        except aiohttp.ConnectionTimeoutError:
            raise EnvironmentAway(self.label, f"no connection within {CONNECT_SECONDS:g} s") from None
        except TimeoutError:
            raise DeadlineExceeded(f"the answer to {verb}", self.label, deadline, "given up") from None
        except BlockedAddress as error:
            raise EnvironmentFailed(self.label, str(error)) from None
        except aiohttp.InvalidURL as error:
            raise EnvironmentFailed(self.label, f"no URL to connect to: {error}") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise EnvironmentAway(self.label, _reason(error), not isinstance(error, aiohttp.ClientConnectorError)) from error
        except (aiohttp.ClientError, ValueError) as error:  # not HTTP, as the answer's head shows
            raise EnvironmentFailed(self.label, f"expected an HTTP answer to {verb}: {words(error)}") from error
        return self._read(verb, status, answer)

    def _read(self, verb: str, status: int, answer: bytes) -> object:
        if 300 <= status < 400:
            raise EnvironmentFailed(self.label, f"answered {verb} with HTTP {status}, a redirect, which is not followed")
        if len(answer) > MAX_ANSWER:
            raise EnvironmentFailed(self.label, f"answered {verb} with more than {MAX_ANSWER} bytes")
        try:
            value: object = parse_json(answer)
        except ValueError as error:
            if status < 300:
                found = f"the answer to {verb} is {words(repr(answer[:60]))}; expected JSON ({words(error)})"
                raise EnvironmentFailed(self.label, found) from None
            value = None
        if not 200 <= status < 300:
            said = value.get("error") if isinstance(value, dict) else None
            if status in (429, 502, 503, 504) and not said:  # of a proxy; the environment itself may have ended by this request
                raise EnvironmentAway(self.label, f"answered {verb} with HTTP {status}", status in (502, 504))
            raise EnvironmentFailed(self.label, f"answered {verb} with HTTP {status}", words(said) if said else "")
        return value

    async def close(self) -> None:
        await self._server.close()


def _reason(error: Exception) -> str:
    """Returns the operating system's words rather than the library's."""
    cause: BaseException = getattr(error, "os_error", None) or error
    return words(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)


MOST_BYTES = 64 << 20  # The largest request: a group of long responses


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
    body = json.dumps(value, allow_nan=False, default=plain)
    return web.Response(status=status, body=body.encode(), content_type="application/json")
