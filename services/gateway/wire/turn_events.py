"""Answers that are streamed: server-sent events, made as a turn is drawn. Each format has one kind."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.wire.request import ChatTurn, TurnDelta, TurnResult, deltas_of
from services.gateway.wire.turn_refused import TurnRefused


def aborted() -> TurnRefused:
    """Returns the refusal of a turn that was aborted: nothing that was drawn of it is an answer."""
    return TurnRefused(410, "the session ended before the turn did", code="session_ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """What is known of a turn when it begins. ``created``: seconds since the epoch. ``prompt``, ``cached``: tokens."""

    request_id: str
    model: str
    created: int
    prompt: int
    cached: int = 0


class TurnEvents(ABC):
    """The events of one answer: `begin`, a `delta` for each piece, then `end`, or `refused` where the turn fails."""

    def __init__(self, turn: ChatTurn, start: TurnStart) -> None:
        self.turn, self.start = turn, start

    @abstractmethod
    def begin(self) -> bytes:
        """Returns the events before the first piece."""

    @abstractmethod
    def delta(self, piece: TurnDelta) -> bytes:
        """Returns the events of a piece."""

    @abstractmethod
    def end(self, result: TurnResult) -> bytes:
        """Returns the last events. ``result``: the whole turn, all of whose text was in deltas."""

    @abstractmethod
    def refused(self, error: TurnRefused) -> bytes:
        """Returns the event that tells why the turn failed: the status of the answer has been sent."""

    def ping(self) -> bytes:
        """Returns what keeps the connection alive while there is nothing to tell."""
        return b": waiting\n\n"

    def whole(self, result: TurnResult) -> Iterator[bytes]:
        """Yields the events of a turn that has ended."""
        yield self.begin()
        if result.finish == "abort":
            yield self.refused(aborted())
            return
        for piece in deltas_of(result):
            yield self.delta(piece)
        yield self.end(result)


def started(result: TurnResult) -> TurnStart:
    """Returns the start of a turn that has ended."""
    usage = result.usage
    return TurnStart(request_id=result.request_id, model=result.model, created=result.created, prompt=usage.prompt, cached=usage.cached)


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Returns a server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"
