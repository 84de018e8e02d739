"""Sends JSON over HTTP to one engine, with a deadline on every call and the engine's own words in every error."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from services.rollout.engine.engine_errors import EngineError, EngineUnreachable
from services.rollout.engine.private_endpoints import SOCKET
from shared.runtime.errors import DeadlineExceeded

IDLE_SECONDS = 3.0
"""The time after which idle connections are closed. SGLang closes its side after 5 s; a request sent then would look like a dead engine."""


class EngineTransport:
    """One HTTP session to one engine. Must be made, used and closed in one event loop.

    Args:
        directory: `EngineProcess.receiver`, in which the engine's server listens.
    """

    def __init__(self, directory: Path) -> None:
        self.url = f"unix:{directory / SOCKET}"
        # the service bounds the number of requests in flight
        connector = aiohttp.UnixConnector(str(directory / SOCKET), limit=0, keepalive_timeout=IDLE_SECONDS)
        self._session = aiohttp.ClientSession("http://engine", connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        """Closes the session and its connections."""
        await self._session.close()

    async def get(self, path: str, deadline: float) -> Any:
        """Sends a GET, which changes nothing in the engine. Otherwise as `post`."""
        return await self._call("GET", path, None, deadline, "nothing was changed")

    async def post(self, path: str, body: Any, deadline: float, next_action: str) -> Any:
        """Sends a POST and returns the parsed JSON, None for an empty answer, or the text of an answer that is not JSON.

        Args:
            body: anything that orjson takes, also numpy arrays; None for none.
            deadline: seconds for everything, connecting and reading included.
            next_action: what happens should the deadline pass, for its error.

        Raises:
            DeadlineExceeded: no complete answer came in time.
            EngineError: the status is other than 2xx; with the engine's message.
            EngineUnreachable: there is no connection, or it broke.
        """
        return await self._call("POST", path, body, deadline, next_action)

    @asynccontextmanager
    async def stream(self, path: str, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a POST of JSON, and yields the answer as it comes, whatever its status. It has no deadline of its own.

        Raises EngineUnreachable.
        """
        self._check_open(path)
        try:
            async with self._session.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
                yield response
        except aiohttp.ClientError as error:
            raise EngineUnreachable(self.url + path, f"{type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def events(self, path: str, body: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """Sends a POST whose answer is a stream of events, and yields their data as they come. It has no deadline of its own.

        Raises EngineError where the answer, or one of its events, is an error; EngineUnreachable.
        """
        async with self.stream(path, orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)) as response:
            if not response.ok:
                raise EngineError(self.url + path, message_of(_parsed(await response.read())), response.status)
            yield self._data(path, response)

    async def _data(self, path: str, response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
        rest = b""
        async for chunk in response.content.iter_any():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: {"):
                    data = orjson.loads(event[len(b"data: ") :])
                    if "error" in data:
                        raise EngineError(self.url + path, message_of(data))
                    yield data

    async def _call(self, method: str, path: str, body: Any, deadline: float, next_action: str) -> Any:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {} if body is None else {"Content-Type": "application/json"}
        self._check_open(path)
        try:
            async with (
                asyncio.timeout(deadline),
                self._session.request(method, path, data=data, headers=headers) as response,
            ):
                answer = _parsed(await response.read())
        except TimeoutError:
            raise DeadlineExceeded(f"the answer to {method} {path}", f"the engine at {self.url}", deadline, next_action) from None
        except aiohttp.ClientError as error:
            raise EngineUnreachable(self.url + path, f"{type(error).__name__}: {error}") from error
        if not response.ok:
            raise EngineError(self.url + path, message_of(answer), response.status)
        return answer

    def _check_open(self, path: str) -> None:
        """Whoever still holds the client of an engine that was replaced meets a dead engine, and no error of the HTTP library's."""
        if self._session.closed:
            raise EngineUnreachable(self.url + path, "its client is closed: another engine took its place, or the service ends")


def message_of(answer: Any) -> str:
    """Returns the engine's message in an error answer; SGLang has four shapes for it."""
    if isinstance(answer, dict):
        error = answer.get("error")
        named = error.get("message") if isinstance(error, dict) else error
        if message := named or answer.get("message") or answer.get("detail"):
            return str(message)
    return str(answer) if answer else "(no message)"


def _parsed(data: bytes) -> Any:
    if not data:
        return None
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace")
