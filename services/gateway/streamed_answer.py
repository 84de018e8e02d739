"""The answer that tells a turn as it is drawn: events as soon as there are tokens, and what was not sure before at the turn's end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from services.gateway.live_turn import LiveTurn
from services.gateway.turn_text import TurnText
from services.gateway.wire.request import TurnResult
from services.gateway.wire.turn_events import TurnEvents, TurnStart, aborted, started
from services.gateway.wire.turn_refused import TurnRefused
from shared.runtime.errors import MyxoError

SILENT_SECONDS = 10.0
"""The time for which a streamed answer may be silent; also that after which it begins although nothing has been drawn."""


class StreamedAnswer:
    """One answer.

    Args:
        start: of a turn of which nothing is known yet. events: those of its format. text: makes what tells the turn's text.
    """

    def __init__(
        self,
        turn: "asyncio.Task[TurnResult]",
        live: LiveTurn,
        start: TurnStart,
        events: Callable[[TurnStart], TurnEvents],
        text: Callable[[], TurnText],
    ) -> None:
        self._turn, self._live, self._start, self._events_of, self._text_of = turn, live, start, events, text
        self._begun: tuple[TurnEvents, TurnText] | None = None

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events, and while there are none what keeps the connection alive."""
        ended = False
        while not ended:
            await self._live.news(SILENT_SECONDS)
            ended = self._turn.done()
            if tokens := self._live.taken():
                if told := self._told(tokens):
                    yield told
            elif not ended:
                yield b": waiting\n\n" if self._begun is None else self._begun[0].ping()
        yield self._end()

    def _told(self, tokens: list[int]) -> bytes:
        head = b""
        if self._begun is None:
            known = replace(self._start, created=int(time.time()), prompt=len(self._live.prompt), cached=self._live.cached)
            self._begun = self._events_of(known), self._text_of()
            head = self._begun[0].begin()
        events, text = self._begun
        return head + b"".join(events.delta(piece) for piece in text.add(tokens))

    def _end(self) -> bytes:
        """Returns the last events: the rest of a turn that has ended, or why it did not."""
        try:
            result = self._turn.result()
            if self._begun is None:
                return b"".join(self._events_of(started(result)).whole(result))
            events, text = self._begun
            if result.finish == "abort":
                raise aborted()
            result = replace(result, created=events.start.created)
            return b"".join([*(events.delta(piece) for piece in text.finish(result)), events.end(result)])
        except MyxoError as error:
            events, head = (self._begun[0], b"") if self._begun is not None else (self._events_of(self._start), None)
            refused = error if isinstance(error, TurnRefused) else TurnRefused(503, str(error))
            return (events.begin() if head is None else head) + events.refused(refused)
