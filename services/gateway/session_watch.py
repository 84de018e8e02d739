"""Ends turns while they are drawn: of sessions that end, since a rollout was given up and nobody waits for its tokens, and all of them when
the gateway stops. No turn's time runs while replicas sleep for a trainer.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.runtime.errors import MyxoError
from shared.runtime.tasks import put_off
from shared.sessions.session import SessionLog
from shared.sessions.session_store import SessionStore

WATCH_SECONDS = 0.5
"""The interval at which is seen which sessions have ended: those of all turns in one round trip."""


class SessionWatch:
    """The sessions whose turns this gateway draws.

    Args:
        asleep: whether replicas sleep now.

    Attributes:
        stopped: whether it draws no more.
    """

    def __init__(self, sessions: SessionStore, asleep: Callable[[], bool]) -> None:
        self._sessions, self._asleep, self.stopped = sessions, asleep, False
        self._watched: dict[asyncio.Timeout, SessionLog] = {}

    @asynccontextmanager
    async def turn(self, log: SessionLog, seconds: float) -> AsyncIterator[None]:
        """Runs the body for so many seconds, and not beyond the session's end. Raises TimeoutError; ``log.ended`` tells which it was,
        `stopped` whether the gateway stops."""
        async with asyncio.timeout(0 if self.stopped else seconds) as limit:
            self._watched[limit] = log
            try:
                yield
            finally:
                del self._watched[limit]

    async def keep(self) -> None:
        """Looks at the sessions again and again. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            elapsed, before = loop.time() - before, loop.time()
            for limit in self._watched if self._asleep() else ():
                put_off(limit, elapsed)
            with contextlib.suppress(MyxoError):  # the store is away: turns see that where they are recorded
                await self._sessions.refresh_all(self._watched.values())
            for limit, log in self._watched.items():
                if log.ended is not None and not limit.expired():
                    limit.reschedule(loop.time())

    def stop(self) -> None:
        """Ends all turns: what was recorded of them is gone on from elsewhere."""
        self.stopped, now = True, asyncio.get_running_loop().time()
        for limit in self._watched:
            if not limit.expired():
                limit.reschedule(now)
