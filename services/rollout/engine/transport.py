"""JSON over HTTP to one engine, a deadline on every call, the engine's own words in every error."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson

from services.rollout.engine.engine_errors import EngineError, EngineUnreachable
from shared.runtime.errors import DeadlineExceeded

IDLE_SECONDS = 3.0
"""Idle connections are closed after this. SGLang's server closes its side after 5 s; a request sent into that moment
would look like a dead engine."""


class EngineTransport:
    """One HTTP session to one engine. Must be made, used and closed in one event loop.

    Args:
        url: for example ``http://127.0.0.1:30000``. admin_key: what the engine was launched with to guard its control calls.
    """

    def __init__(self, url: str, admin_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else None
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)  # what is in flight, the service bounds
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        """Close the session and its connections."""
        await self._session.close()

    async def get(self, path: str, deadline: float, then: str) -> Any:
        """GET; see ``call``."""
        return await self.call("GET", path, None, deadline, then)

    async def post(self, path: str, body: Any, deadline: float, then: str) -> Any:
        """POST; see ``call``."""
        return await self.call("POST", path, body, deadline, then)

    async def call(self, method: str, path: str, body: Any, deadline: float, then: str) -> Any:
        """One request and its answer.

        Args:
            method: GET or POST. path: with its leading slash. body: what orjson takes, numpy arrays too; None for none.
            deadline: seconds for everything, connecting and reading included.
            then: what happens next should the deadline pass, for its error.

        Returns:
            The parsed JSON; None for an empty answer; the text of an answer that is no JSON.

        Raises:
            DeadlineExceeded: no complete answer in time.
            EngineError: a status other than 2xx, with the engine's message.
            EngineUnreachable: no connection, or it broke.
        """
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(deadline),
                self._session.request(method, self.url + path, data=data, headers=headers) as response,
            ):
                status, answer = response.status, _parsed(await response.read())
        except TimeoutError:
            raise DeadlineExceeded(f"the answer to {method} {path}", f"the engine at {self.url}", deadline, then) from None
        except aiohttp.ClientError as error:
            raise EngineUnreachable(self.url + path, f"{type(error).__name__}: {error}") from error
        if not 200 <= status < 300:
            raise EngineError(self.url + path, message_of(answer), status)
        return answer

    async def status(self, method: str, path: str, deadline: float) -> int:
        """The HTTP status alone, of a request without a body. Raises as ``call`` does, but for no status."""
        try:
            async with asyncio.timeout(deadline), self._session.request(method, self.url + path) as response:
                return response.status
        except TimeoutError:
            raise DeadlineExceeded(f"the status of {method} {path}", f"the engine at {self.url}", deadline, "nothing was changed") from None
        except aiohttp.ClientError as error:
            raise EngineUnreachable(self.url + path, f"{type(error).__name__}: {error}") from error


def message_of(answer: Any) -> str:
    """The engine's message in an error answer; SGLang has four shapes for it."""
    if isinstance(answer, dict):
        error = answer.get("error")
        for message in (
            error.get("message") if isinstance(error, dict) else error,
            answer.get("message"),
            answer.get("detail"),
        ):
            if message:
                return str(message)
    return str(answer) if answer else "(no message)"


def _parsed(data: bytes) -> Any:
    if not data:
        return None
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace")
