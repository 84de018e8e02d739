"""The open sessions of agents, read from the store while a browser asks, a bounded part at a time, and their routes."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from redis.exceptions import RedisError

from services.console.pages.sample_tokens import safe
from services.console.run_source import RunSource, SourceAway
from shared.runtime.errors import BadMessage, MyxoError
from shared.schema.message import Message
from shared.sessions.session import Session, SessionProgress
from shared.sessions.session_store import KEPT_SECONDS, OPENED_SECONDS, SessionStore

FRESH_SECONDS = 2.0  # What was read is not read again sooner than this, however many browsers look
READ_SECONDS = 8.0

MOST_OPEN = 5000  # The sessions whose records are looked for; of more the oldest are left out
LONGEST_BACK = 7 * 24 * 3600  # Seconds: sessions that were opened longer ago are not looked for


@dataclass
class OpenSessions:
    """Pages share it: ``source.shared(OpenSessions)``."""

    source: RunSource
    _read: dict[int, int] = field(default_factory=dict)
    _names: dict[str, None] = field(default_factory=dict)
    _known: dict[str, SessionProgress] = field(default_factory=dict)
    _at: float = -FRESH_SECONDS
    _life: str | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def page(self, offset: int, limit: int) -> tuple[list[SessionProgress], int]:
        """Returns the open sessions from ``offset`` on, the oldest first, and how many there are. Raises SourceAway."""
        store = self.source.store()
        try:
            async with self._lock:
                sessions = SessionStore(store, self.source.run)
                await self._look(sessions)
                return await self._page(sessions, offset, limit), len(self._names)
        except (MyxoError, RedisError) as error:
            raise SourceAway(f"the sessions cannot be read: {str(error) or type(error).__name__}") from error

    async def _look(self, sessions: SessionStore) -> None:
        """Learns which sessions are there."""
        if self._life != self.source.life:
            self._read, self._names, self._known, self._life, self._at = {}, {}, {}, self.source.life, -FRESH_SECONDS
        if time.monotonic() - self._at < FRESH_SECONDS:
            return
        newest, config = int(time.time() // OPENED_SECONDS), self.source.config
        longest = config.rollout.agent_timeout if config is not None else OPENED_SECONDS
        back = min(longest + KEPT_SECONDS, LONGEST_BACK)  # deadlines are put off while engines sleep for a trainer
        oldest = newest - int(back // OPENED_SECONDS) - 1
        for stretch in range(oldest, newest + 2):  # the replicas' clocks may be before this one
            found = await sessions.opened(stretch, self._read.get(stretch, 0), READ_SECONDS)
            self._read[stretch] = self._read.get(stretch, 0) + len(found)
            self._names |= dict.fromkeys(found)
        self._read = {stretch: count for stretch, count in self._read.items() if stretch >= oldest}
        names = list(self._names)[-MOST_OPEN:]
        lengths = await sessions.lengths(names, READ_SECONDS)
        self._names = dict.fromkeys(name for name, length in zip(names, lengths, strict=True) if length)
        self._known = {name: progress for name, progress in self._known.items() if name in self._names}
        self._at = time.monotonic()

    async def _page(self, sessions: SessionStore, offset: int, limit: int) -> list[SessionProgress]:
        """Returns what is there of a page; sessions that turn out to have ended make room for the next ones."""
        found: list[SessionProgress] = []
        names = iter(list(self._names)[offset:])
        while len(found) < limit and (wanted := [name for name, _ in zip(names, range(limit - len(found)), strict=False)]):
            known = [(name, self._known[name].length if name in self._known else 0) for name in wanted]
            for name, records in zip(wanted, await sessions.records(known, READ_SECONDS), strict=True):
                progress = self._progress(name, records)
                if progress is not None and not progress.ended:
                    found.append(progress)
                else:
                    self._names.pop(name, None)
        shown = {progress.session.id for progress in found}
        self._known = {name: progress for name, progress in self._known.items() if name in shown}
        return found

    def _progress(self, name: str, records: list[bytes]) -> SessionProgress | None:
        try:
            progress = self._known.get(name)
            if progress is None:
                if not records:
                    return None
                progress = self._known[name] = SessionProgress(Session.decode(records[0]))
                records = records[1:]
            progress.apply(map(Message.decode, records))
        except BadMessage:
            return None
        return progress


MOST_SESSIONS = 100


class SessionRow(BaseModel):
    """A session in flight. at, opened, asked, deadline: seconds since the epoch; asked: when its newest turn began, None before the first.

    replica: that plays its rollout; engine: the replica of its newest tokens. drawing: turns that are being generated. tokens: generated
    so far; those of an open turn count as they are recorded. context: tokens of the newest turn. oldest, newest: versions.
    """

    session: str
    group: str
    rollout: int
    attempt: int
    evaluation: bool
    opened: float | None
    deadline: float
    asked: float | None
    turns: int
    drawing: int
    tokens: int
    context: int
    gateway: str
    engine: str
    replica: str
    oldest: int | None
    newest: int | None


class SessionPage(BaseModel):
    """Sessions in flight, the oldest first: those from ``offset`` on, of about ``total``. ``agents``: whether an agent plays this run's
    groups; ``now``: by the console's clock."""

    sessions: list[SessionRow]
    total: int
    offset: int
    limit: int
    agents: bool
    now: float


def session_row(progress: SessionProgress) -> SessionRow:
    """Returns a session as a line of a list."""
    session = progress.session
    names = ("turns", "tokens", "context", "asked", "oldest", "newest")
    return SessionRow(
        **{name: getattr(progress, name) for name in names},
        **{name: getattr(session, name) for name in ("group", "rollout", "attempt", "evaluation", "opened", "deadline")},
        session=safe(session.id),
        drawing=progress.pending,
        gateway=safe(progress.gateway.partition(".")[0]),
        engine=safe(progress.engine),
        replica=safe(session.replica),
    )


def router(source: RunSource) -> APIRouter:
    """Returns the routes."""
    router, found = APIRouter(), source.shared(OpenSessions)

    @router.get("/sessions")
    async def read_sessions(
        offset: Annotated[int, Query(ge=0)] = 0, limit: Annotated[int, Query(ge=1, le=MOST_SESSIONS)] = 25
    ) -> SessionPage:
        """A page of the sessions that agents play now, the oldest first."""
        if source.live and source.config is None:
            source.bus()
            raise SourceAway("the run's config has not been read yet")
        agents = source.config is not None and source.config.has_agents
        at_work = source.live and not source.at_rest
        sessions, total = await found.page(offset, limit) if at_work else ([], 0)
        rows = [session_row(progress) for progress in sessions]
        return SessionPage(sessions=rows, total=total, offset=offset, limit=limit, agents=agents, now=time.time())

    return router
