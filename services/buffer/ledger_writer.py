"""The ledger's only writer: records go to the stream in order, each confirmed, and never beside another writer's.

Only entries of `services.buffer.trial` are appended, so whatever is in the ledger replays.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator

from services.buffer.state import BufferState
from services.buffer.trial import LedgerEntry, Trial
from shared.bus import stream_replay
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.schema.ledger import LedgerRecord

RELEASES_AGAIN = 256
"""The number of the latest payload releases that are repeated after a restart: more than a killed buffer can have left undone."""


class LedgerWriter:
    """Replays the run's ledger, and appends to it.

    Every append names the sequence it expects to follow: when another buffer has written in between, this one gets `WrongSequence`
    and must stop, so two active buffers can never both be believed.

    Args:
        allowed: awaited before each try to append; it raises where this buffer may not write any more. read: takes each record that is
            read from the ledger, and the state before it.
    """

    def __init__(
        self, bus: Bus, run: str, allowed: Callable[[], Awaitable[None]], read: Callable[[BufferState, LedgerRecord], None]
    ) -> None:
        self._bus, self._subjects, self._allowed, self._read = bus, Subjects(run), allowed, read
        self._stream = self._subjects.ledger_stream
        self._state = BufferState()
        self._trial = Trial(self._state)
        self._releases: deque[list[str]] = deque(maxlen=RELEASES_AGAIN)
        self.last = 0
        """The sequence of the last record that was read or appended."""
        self.behind = 0
        """How many records are still to be read, the present one among them, while the ledger is read."""

    async def follow(self) -> None:
        """Reads the records that were added to the ledger since the last time."""
        newest = await stream_replay.last_sequence(self._bus, self._stream)
        if newest <= self.last:
            return
        async for sequence, record in stream_replay.read(self._bus, self._stream, LedgerRecord, after=self.last):
            self.behind = newest - sequence + 1
            self._read(self._state, record)
            self._trial.follow(record)
            self.last = sequence
            if self._state.released:
                self._releases.append(self._state.released)
        self.last = max(self.last, newest)  # a stream that was emptied has a last sequence all the same

    async def recover(self) -> tuple[BufferState, list[str]]:
        """Reads the ledger to its end; returns the state, and the payload keys that the latest records let go."""
        await self.follow()
        return self._state, [key for keys in self._releases for key in keys]

    def tried(self, records: Iterable[LedgerRecord]) -> Iterator[LedgerEntry]:
        """Yields what is to be appended for these records and then folded into the state, one after the other. Raises BadRecord."""
        return self._trial.entries(records, self._bus.message_limit)

    async def append(self, entry: LedgerEntry) -> None:
        """Appends a record. Raises WrongSequence beside another writer, DeadlineExceeded where the bus stays away, and as ``allowed``."""
        record = entry.record
        msg_id, after = f"{self._stream}.{self.last + 1}.{record.at}", (self._stream, self.last)
        subject = self._subjects.ledger(record.event())
        self.last = await self._bus.publish(subject, entry.data, msg_id=msg_id, after=after, before=self._allowed, deadline=120)
