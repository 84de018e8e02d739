"""The spans of turns: one for each time that a gateway drew one, in the trace of the turn's group."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shared.runtime.traces import Traces, TraceSpan
from shared.sessions.session import PendingTurn, SessionLog, Turn

TURN = "turn"


@dataclass
class TracedTurn:
    """A turn that is being drawn. ``turn``: set by who draws it, once it has ended."""

    turn: Turn | None = None


@contextmanager
def traced_turn(traces: Traces, log: SessionLog, begun: PendingTurn) -> Iterator[TracedTurn]:
    """Adds the turn's span when the body is over, whatever ends it. ``begun``: the turn as it is taken up."""
    found, started, error = TracedTurn(), time.time(), ""
    before = len(begun.completion)  # more is added to it as it is drawn
    try:
        yield found
    except BaseException as raised:
        error = _why(log, raised)
        raise
    finally:
        if traces.on:
            traces.add(turn_span(log, begun, found.turn, (started, time.time()), before, error))


def turn_span(
    log: SessionLog, begun: PendingTurn, turn: Turn | None, times: tuple[float, float], before: int = 0, error: str = ""
) -> TraceSpan:
    """Returns the span of a turn.

    Args:
        turn: None where it failed. times: of its begin and end, seconds since the epoch. before: tokens that others had drawn of it.
    """
    session = log.session
    completion, versions = begun.completion if turn is None else turn.completion, [] if turn is None else [span[2] for span in turn.spans]
    return TraceSpan(
        trace=session.group,
        name=TURN,
        started=times[0],
        ended=times[1],
        error=error,
        attributes={
            "group": session.group,
            "attempt": session.attempt,
            "rollout": session.rollout,
            "session": session.id,
            "request": begun.request,
            "continues": begun.parent,
            "taken_over": before > 0,
            "prompt_tokens": len(begun.prompt),
            "tokens": len(completion),
            "cached_tokens": None if turn is None else turn.cached,
            "finish": None if turn is None else turn.finish,
            "replica": (begun.replica if turn is None else turn.replica) or None,
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
        },
    )


def _why(log: SessionLog, raised: BaseException) -> str:
    if log.ended is not None:
        return "the session has ended" + (f": {log.ended.reason}" if log.ended.reason else "")
    if isinstance(raised, asyncio.CancelledError):
        return "its time was over, or its client is gone"
    return str(raised) or type(raised).__name__
