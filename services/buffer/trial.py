"""Tries records before they are appended: each is encoded, decoded and folded into a copy of the state. Pure.

So whatever is in the ledger replays, to the very state that the buffer has.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.buffer import record_size
from services.buffer.state import BufferState
from shared.runtime.errors import MyxoError
from shared.schema.ledger import LedgerRecord


class BadRecord(MyxoError):
    """A decision comes to nothing that could be recorded; nothing has changed. The text says why."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A record to append. record: as it is read back from ``data``."""

    record: LedgerRecord
    data: bytes


class Trial:
    """A copy of the ``state`` that is ahead of it by the record that is about to be appended."""

    def __init__(self, state: BufferState) -> None:
        self._state, self._ahead = state, copy.deepcopy(state)

    def entries(self, records: Iterable[LedgerRecord], limit: int) -> Iterator[LedgerEntry]:
        """Yields the records, in pieces of at most ``limit`` bytes. Raises BadRecord for one that would not replay.

        Each is to be appended, and folded into the state, before the next one is asked for.
        """
        pieces = record_size.fitted(records, limit)
        while (entry := self._next(pieces)) is not None:
            yield entry

    def _next(self, pieces: Iterator[tuple[LedgerRecord, bytes]]) -> LedgerEntry | None:
        name = "a record"
        try:
            for record, data in pieces:
                name = type(record).__name__
                entry = LedgerEntry(LedgerRecord.decode(data), data)
                self._ahead.apply(entry.record)
                return entry
            return None
        except Exception as error:  # whatever is wrong with it, it costs this decision and nothing else
            self._ahead = copy.deepcopy(self._state)
            raise BadRecord(f"{name} is not recorded: {type(error).__name__}: {error}") from error

    def follow(self, record: LedgerRecord) -> None:
        """Folds a record of the ledger into both states."""
        self._state.apply(record)
        self._ahead.apply(record)
