"""``slime.utils.http_utils`` and ``slime.utils.async_utils``: requests to the engine and to other servers, and coroutines from plain code.

Requests are tried again where that may help. No call has to open the client.
"""

import asyncio
import json
import threading
import time
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp

from shared.runtime.tasks import run_in_thread

CALL_HEADER = "X-Myxo-Call"
"""The header by which the proxy of an engine knows the call that a request belongs to, so that its requests can be ended."""


@dataclass
class CallContext:
    """One call of a generate function.

    Attributes:
        token: names it to the engine's proxy. engine: ``host:port`` of this. end: `time.monotonic` at which the call is late.
    """

    token: str
    engine: str
    end: float


current_call: ContextVar[CallContext | None] = ContextVar("current_call", default=None)


class BackgroundLoop:
    """An event loop in a thread of its own, which lives as long as the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        run_in_thread(self.loop.run_forever, "slime-async-utils")

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        """Returns the coroutine's result; the calling thread waits for it."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result()


_lock = threading.Lock()
_background: BackgroundLoop | None = None


def get_async_loop() -> BackgroundLoop:
    """Returns the process's one loop for such coroutines."""
    global _background
    with _lock:
        if _background is None:
            _background = BackgroundLoop()
        return _background


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that runs on the background loop."""
    return get_async_loop().run(coro)


TRIES = 60
PAUSE_S = 1.0
LONGEST_S = 14400.0  # The seconds for one request outside of a call that has a deadline of its own

_PASSING = {408, 409, 425, 429}  # Status codes of 4xx that another try may change

_sessions: weakref.WeakKeyDictionary[AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()


class HTTPStatusError(Exception):
    """An answer whose status is an error. ``status``: its code."""

    def __init__(self, url: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{url} answered {status}: {text[:500]}")


async def post(url: str, payload: Any, max_retries: int = TRIES, headers: dict[str, str] | None = None) -> Any:
    """Returns what a server answers to a JSON object: JSON, or text.

    Errors of the connection and of the server are tried again, ``max_retries`` times in all, a second apart, until the call is late; what
    the server says is wrong with the request is not. Raises HTTPStatusError, aiohttp.ClientError or TimeoutError.
    """
    for left in range(max_retries - 1, -1, -1):
        try:
            return await _answer("POST", url, json=payload or {}, headers=_headers(url, headers))
        except (aiohttp.ClientError, TimeoutError, HTTPStatusError) as error:
            final = isinstance(error, HTTPStatusError) and 400 <= error.status < 500 and error.status not in _PASSING
            if final or not left or _left_s() <= PAUSE_S:
                raise
        await asyncio.sleep(PAUSE_S)
    raise ValueError(f"max_retries is {max_retries}; expected at least 1")


async def get(url: str) -> Any:
    """Returns what a server answers. Raises as `post`."""
    return await _answer("GET", url, headers=_headers(url, None))


async def close_session() -> None:
    """Closes the connections of the running loop; a later request opens others."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


def get_rollout_num_engines(args: Any) -> int:
    """Returns the number of engines behind ``args.sglang_router_ip``."""
    if (engines := getattr(args, "rollout_num_engines", None)) is not None:
        return int(engines)
    gpus, each = getattr(args, "rollout_num_gpus", None) or 0, getattr(args, "rollout_num_gpus_per_engine", None) or 1
    return max(1, gpus // each) if gpus > 0 else 0


def init_http_client(args: Any) -> None:
    """Does nothing: the first request opens what it needs."""


async def _answer(method: str, url: str, **request: Any) -> Any:
    timeout = aiohttp.ClientTimeout(total=max(_left_s(), PAUSE_S))
    async with _session().request(method, url, timeout=timeout, **request) as answer:
        body = await answer.read()
        if answer.status >= 400:
            raise HTTPStatusError(url, answer.status, body.decode(errors="replace"))
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def _session() -> aiohttp.ClientSession:
    """Returns the session of the running loop: threads of the user's have loops of their own."""
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        _sessions[loop] = session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    return session


def _headers(url: str, headers: dict[str, str] | None) -> dict[str, str]:
    call = current_call.get()
    own = {} if call is None or f"//{call.engine}/" not in url else {CALL_HEADER: call.token}
    return {**(headers or {}), **own}


def _left_s() -> float:
    call = current_call.get()
    return LONGEST_S if call is None else call.end - time.monotonic()
