"""Ends the turns of sessions that end while they are drawn: a rollout was given up, and nobody waits for its tokens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.runtime.errors import MyxoError
from shared.sessions.session import SessionLog
from shared.sessions.session_store import SessionStore

WATCH_SECONDS = 0.5
"""The interval at which is seen which sessions have ended: those of all turns in one round trip."""


class SessionWatch:
    """The sessions whose turns this gateway draws."""

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions = sessions
        self._watched: dict[asyncio.Timeout, SessionLog] = {}

    @asynccontextmanager
    async def turn(self, log: SessionLog, seconds: float) -> AsyncIterator[None]:
        """Runs the body for so many seconds, and not beyond the session's end. Raises TimeoutError; ``log.ended`` tells which it was."""
        async with asyncio.timeout(seconds) as limit:
            self._watched[limit] = log
            try:
                yield
            finally:
                del self._watched[limit]

    async def keep(self) -> None:
        """Looks at the sessions again and again. Runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            with contextlib.suppress(MyxoError):  # the store is away: turns see that where they are recorded
                await self._sessions.refresh_all(self._watched.values())
            for limit, log in self._watched.items():
                if log.ended is not None and not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())
