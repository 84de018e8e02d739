"""An environment that answers over HTTP, in JSON.

The environment is not trusted: no redirect is followed, no proxy and no netrc of this process's environment is used, no cookie is kept;
a name is resolved once for each connection, and only the checked addresses are connected to; an answer is read up to
a limit.
"""

import asyncio
import json
import socket
from typing import Any

import aiohttp
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from shared.environment.environment import Environment
from shared.environment.environment_url import EnvironmentUrl, blocked
from shared.environment.protocol import MAX_ANSWER, EnvironmentAway, EnvironmentFailed, words
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.safe_files import parse_json

CONNECT_SECONDS = 3.0
"""The seconds that resolving and connecting may take before the environment counts as unreachable."""

IDLE_SECONDS = 3.0
"""Idle connections are closed after this: the usual servers close theirs after 5 s, and a request sent into that moment would be lost."""


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
        connector=aiohttp.TCPConnector(
            limit=connections,
            keepalive_timeout=IDLE_SECONDS,
            use_dns_cache=False,
            resolver=CheckedResolver(),
        ),
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
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


class HttpEnvironment(Environment):
    """``GET /describe``, and ``POST`` for each other verb, below one URL."""

    def __init__(self, name: str, address: EnvironmentUrl) -> None:
        super().__init__(name, address.shown)
        self._url = URL(address.url)
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, verb: str, question: dict[str, Any] | None, deadline: float) -> object:
        if why := blocked(self._url.host or ""):
            raise EnvironmentFailed(self.label, f"{self._url.host} is {why}, which is never connected to")
        try:
            data = None if question is None else json.dumps(question, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFailed(self.label, f"the request does not go into JSON: {error}") from error
        try:
            async with asyncio.timeout(deadline):
                status, answer = await self._exchange(verb, data)
        except aiohttp.ConnectionTimeoutError:
            raise EnvironmentAway(self.label, f"no connection within {CONNECT_SECONDS:g} s") from None
        except TimeoutError:
            raise DeadlineExceeded(f"the answer to {verb}", self.label, deadline, "given up") from None
        except BlockedAddress as error:
            raise EnvironmentFailed(self.label, str(error)) from None
        except aiohttp.InvalidURL as error:
            raise EnvironmentFailed(self.label, f"no URL to connect to: {error}") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise EnvironmentAway(self.label, _reason(error)) from error
        except (aiohttp.ClientError, ValueError) as error:  # not HTTP, as the answer's head shows
            raise EnvironmentFailed(self.label, f"expected an HTTP answer to {verb}: {words(error)}") from error
        return self._read(verb, status, answer)

    async def _exchange(self, verb: str, data: bytes | None) -> tuple[int, bytes]:
        """Returns status and body, of which one byte over the limit is read at most."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "myxo"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        method = "GET" if data is None else "POST"
        async with self._open().request(method, self._url / verb, data=data, headers=headers, allow_redirects=False) as response:
            self.content_type = response.headers.get("Content-Type", "")
            return response.status, await read_body(response)

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
            raise EnvironmentFailed(self.label, f"answered {verb} with HTTP {status}", words(said) if said else "")
        return value

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = open_session(0, CONNECT_SECONDS)  # the service limits the requests in flight
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _reason(error: Exception) -> str:
    """Returns the operating system's words rather than the library's."""
    cause: BaseException = getattr(error, "os_error", None) or error
    return words(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)
