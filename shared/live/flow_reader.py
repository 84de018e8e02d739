"""Keeps a `FlowHistory` up to date from a run's ledger and events: it begins near their ends, whatever the run's length."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from shared.bus.streams import Entry
from shared.bus.subjects import Subjects
from shared.history.flow_history import FlowHistory
from shared.live.flow_view import doing
from shared.schema.ledger import LedgerRecord
from shared.schema.service_messages import MetricsWritten, ServiceEvent, ServiceStatus
from shared.schema.weight_messages import WeightsPushed

LEDGER = ">"
"""All records of the ledger."""

TAIL = 20_000
"""The newest records of a ledger that are read."""


class StreamReader(Protocol):
    """Reads a stream as `shared.bus.streams.read` does."""

    def __call__(
        self, stream: str, model: type[Entry], subject: str = ">", *, after: int = 0, strict: bool = True
    ) -> AsyncIterator[tuple[int, Entry]]: ...


class FlowReader:
    """Reads what is new in a run.

    Args:
        read: reads streams. last: the sequence of the ledger's newest record when the reading begins.
    """

    def __init__(self, run: str, read: StreamReader, last: int) -> None:
        self.history = FlowHistory()
        self._names, self._read = Subjects(run), read
        self._seen = {LEDGER: max(0, last - TAIL)}

    @property
    def sequence(self) -> int:
        """Returns the sequence of the newest record of the ledger that was read."""
        return self._seen[LEDGER]

    async def catch_up(self) -> bool:
        """Reads on to the streams' present ends; returns whether there was anything new."""
        history, names, before = self.history, self._names, dict(self._seen)
        async for record in self._new(LEDGER, names.ledger_stream, LedgerRecord):
            history.apply(record)
        async for pushed in self._new(names.event("weights", "pushed"), names.events_stream, WeightsPushed):
            history.push(pushed)
        async for event in self._new(names.event("service", "*"), names.events_stream, ServiceEvent):
            history.told(event)
        async for written in self._new(names.event("trainer", "metrics"), names.events_stream, MetricsWritten):
            history.metric(written)
        history.forget()
        return before != self._seen

    async def _new(self, subject: str, stream: str, model: type[Entry]) -> AsyncIterator[Entry]:
        """Yields what a subject of a stream holds beyond what was read. Of events, those that cannot be decoded are left out."""
        async for sequence, entry in self._read(stream, model, subject, after=self._seen.get(subject, 0), strict=subject == LEDGER):
            yield entry
            self._seen[subject] = sequence

    def look(self, statuses: Sequence[ServiceStatus], now: float) -> None:
        """Takes the statuses of the services as they are at ``now``, seconds since the epoch."""
        for status in statuses:
            self.history.look(status.service, status.instance, doing(status), now)
