"""The ledger's one writer: records go to the stream in order, each confirmed, and never beside another writer's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from services.buffer.state import BufferState
from shared import replay
from shared.bus import Bus
from shared.ledger import LedgerRecord
from shared.subjects import Subjects

RELEASES_AGAIN = 256
"""How many of the latest releases of payloads are repeated after a restart: more than a killed buffer can have left undone."""


class Journal:
    """Appends to the run's ledger.

    Every append names the sequence it expects to follow: when another buffer has written in between, this one gets `WrongSequence`
    and must stop, so two active buffers can never both be believed.
    """

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus, self._subjects, self._last = bus, Subjects(run), 0

    async def recover(self) -> tuple[BufferState, list[str]]:
        """Replays the ledger into a fresh state; returns it with the payload keys that its latest records let go."""
        state = BufferState()
        released: deque[list[str]] = deque(maxlen=RELEASES_AGAIN)
        stream = self._subjects.ledger_stream
        self._last = await replay.last_sequence(self._bus, stream)
        async for sequence, record in replay.read(self._bus, stream, LedgerRecord):
            state.apply(record)
            self._last = sequence
            if state.released:
                released.append(state.released)
        return state, [key for keys in released for key in keys]

    async def append(self, records: Iterable[LedgerRecord]) -> None:
        """Raises WrongSequence when another writer is active, DeadlineExceeded when the bus stays away."""
        stream = self._subjects.ledger_stream
        for record in records:
            msg_id = f"{stream}.{self._last + 1}.{record.at}"
            self._last = await self._bus.publish(
                self._subjects.ledger(record.event()), record, msg_id=msg_id, after=(stream, self._last), deadline=120
            )
