"""``/api/samples/sessions``: the sessions that agents play now."""

import time
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from services.console.open_sessions import OpenSessions
from services.console.pages.page_text import safe
from services.console.run_source import RunSource, SourceAway
from shared.sessions.session import SessionProgress

MOST_SESSIONS = 100


class SessionRow(BaseModel):
    """A session in flight. at, opened, asked, deadline: seconds since the epoch; asked: when its newest turn began, None before the first.

    replica: who looks after its rollout; engine: the replica of its newest tokens. drawing: turns that are being drawn. tokens: drawn so
    far; those of a turn that is being drawn count as they are recorded. context: tokens of the newest turn. oldest, newest: versions.
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
