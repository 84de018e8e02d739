"""Asks replicas' doors for tokens."""

from http import HTTPStatus

import aiohttp

from services.gateway.wire.turn_refused import TurnRefused
from shared.runtime.errors import BadMessage, MyxoError
from shared.sessions.draw import CONTENT_TYPE, DRAW_PATH, KEY_HEADER, Drawn, DrawRequest
from shared.sessions.session_store import SessionStore

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

    async def draw(self, url: str, request: DrawRequest) -> Drawn:
        """Returns what a replica draws. Raises ReplicaFailed; TurnRefused where the engine refuses the request for what it is."""
        status, body = await self._post(url, request)
        if status == HTTPStatus.UNAUTHORIZED:  # the store was emptied, and the key made anew
            self._key = ""
            status, body = await self._post(url, request)
        if status == HTTPStatus.BAD_REQUEST:
            raise TurnRefused(400, f"the engine refuses it: {_text(body)}")
        if status != HTTPStatus.OK:
            raise ReplicaFailed(url, f"answered {status}: {_text(body)}", busy=status == HTTPStatus.TOO_MANY_REQUESTS)
        try:
            return Drawn.decode(body)
        except BadMessage as error:
            raise ReplicaFailed(url, f"gave an answer that cannot be read: {error}") from error

    async def _post(self, url: str, request: DrawRequest) -> tuple[int, bytes]:
        self._key = self._key or await self._sessions.draw_key() or ""
        timeout = aiohttp.ClientTimeout(total=request.seconds + SPARE_SECONDS)
        headers = {KEY_HEADER: self._key, "Content-Type": CONTENT_TYPE}
        try:
            async with self._http.post(url + DRAW_PATH, data=request.encode(), headers=headers, timeout=timeout) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaFailed(url, f"gave no answer ({str(error) or type(error).__name__})") from error


def _text(body: bytes) -> str:
    return body[:500].decode(errors="replace")
