"""Asks replicas' doors for tokens."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import aiohttp

from services.gateway.wire.turn_refused import TurnRefused
from shared.runtime.errors import BadMessage, MyxoError
from shared.sessions.session import CONTENT_TYPE, DRAW_PATH, KEY_HEADER, LENGTH_BYTES, Drawn, DrawRequest
from shared.sessions.session_store import SessionStore

Hear = Callable[[Drawn], None]
"""Is told each piece of a turn as it is drawn."""

SPARE_SECONDS = 5.0
"""What an answer may take beyond the time that its draw has."""


class ReplicaFailed(MyxoError):
    """A replica did not draw: it is gone, fenced or behind by now. Another may. ``busy``: it has no room."""

    def __init__(self, url: str, reason: str, *, busy: bool = False) -> None:
        self.busy = busy
        super().__init__(f"{url}: {reason}")


class DrawClient:
    """Draws at replicas' doors, with the key that they and gateways share."""

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions, self._key = sessions, ""
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def close(self) -> None:
        await self._http.close()

    async def draw(self, url: str, request: DrawRequest, hear: Hear | None = None) -> Drawn:
        """Returns what a replica draws; of a streamed request ``hear`` gets each piece first, and what was heard is returned as aborted
        where the replica fails then. Raises ReplicaFailed; TurnRefused where the engine refuses the request for what it is."""
        status, body = await self._post(url, request, hear)
        if status == HTTPStatus.UNAUTHORIZED:  # the store was emptied, and the key made anew
            self._key = ""
            status, body = await self._post(url, request, hear)
        if isinstance(body, Drawn):
            return body
        if status == HTTPStatus.BAD_REQUEST:
            raise TurnRefused(400, f"the engine refuses it: {_text(body)}")
        if status != HTTPStatus.OK:
            raise ReplicaFailed(url, f"answered {status}: {_text(body)}", busy=status == HTTPStatus.TOO_MANY_REQUESTS)
        try:
            return Drawn.decode(body)
        except BadMessage as error:
            raise ReplicaFailed(url, f"gave an answer that cannot be read: {error}") from error

    async def _post(self, url: str, request: DrawRequest, hear: Hear | None) -> tuple[int, bytes | Drawn]:
        self._key = self._key or await self._sessions.draw_key() or ""
        timeout = aiohttp.ClientTimeout(total=request.seconds + SPARE_SECONDS)
        headers = {KEY_HEADER: self._key, "Content-Type": CONTENT_TYPE}
        try:
            async with self._http.post(url + DRAW_PATH, data=request.encode(), headers=headers, timeout=timeout) as answer:
                if hear is not None and answer.status == HTTPStatus.OK:
                    return answer.status, await _heard(url, answer.content, hear)
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaFailed(url, f"gave no answer ({str(error) or type(error).__name__})") from error


async def _heard(url: str, content: aiohttp.StreamReader, hear: Hear) -> Drawn:
    """Returns all pieces of an answer as one. Raises ReplicaFailed, and aiohttp's errors, where there is none."""
    whole: Drawn | None = None
    try:
        while length := await content.read(LENGTH_BYTES):
            length += await content.readexactly(LENGTH_BYTES - len(length))
            piece = Drawn.decode(await content.readexactly(int.from_bytes(length)))
            whole = piece if whole is None else whole.then(piece)
            hear(piece)
    except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError, OSError, BadMessage) as error:
        if whole is None:  # what was heard is good, and is not told again
            raise ReplicaFailed(url, f"broke its answer off ({str(error) or type(error).__name__})") from error
    if whole is None:
        raise ReplicaFailed(url, "gave an answer without a piece")
    return whole


def _text(body: bytes) -> str:
    return body[:500].decode(errors="replace")
