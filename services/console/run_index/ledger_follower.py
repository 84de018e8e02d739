"""Keeps an index at the end of a run's ledger, piece by piece, so that a long history holds up nothing else."""

import asyncio
import contextlib
import time

import nats.errors
import nats.js.errors

from services.console.run_index.group_index import GroupIndex
from services.console.run_source import RunSource, SourceAway
from shared.bus.bus_errors import TRANSIENT
from shared.schema.ledger import LedgerRecord

RECORDS = 256
"""Ledger records that are folded together."""

PIECE_SECONDS = 2.0
"""The time after which others have their turn."""


class LedgerFollower:
    """Reads the ledger into an index. ``end``: the ledger's newest sequence, as last heard."""

    def __init__(self, source: RunSource, index: GroupIndex) -> None:
        self._source, self._index = source, index
        self._created: object = None
        self.end = 0

    @property
    def behind(self) -> bool:
        """Returns whether there are records that are not in the index yet."""
        return self._index.sequence < self.end

    async def catch_up(self) -> bool:
        """Takes what is new, for `PIECE_SECONDS`; returns whether the index has changed.

        A ledger that was made anew is read from its beginning. Raises SourceAway, BadMessage.
        """
        before = self._index.revision
        await self._look()
        if self.behind:
            await self._read_on(time.monotonic() + PIECE_SECONDS)
        return self._index.revision != before

    async def _read_on(self, end: float) -> None:
        """Takes further records until ``end`` (monotonic), or the ledger's."""
        stream, records = self._source.names.ledger_stream, list[tuple[int, LedgerRecord]]()
        async with contextlib.aclosing(self._source.read(stream, LedgerRecord, after=self._index.sequence)) as reading:
            async for entry in reading:
                records.append(entry)
                if len(records) == RECORDS:
                    await asyncio.to_thread(self._index.apply, records)
                    records = []
                    if time.monotonic() > end:
                        return
        if records:
            await asyncio.to_thread(self._index.apply, records)

    async def _look(self) -> None:
        """Learns where the ledger ends, and whether it is the one that the index is of."""
        stream = self._source.names.ledger_stream
        try:
            info = await self._source.bus().js.stream_info(stream)
        except (nats.errors.Error, nats.js.errors.Error, *TRANSIENT) as error:
            raise SourceAway(f"the state of {stream} could not be read: {str(error) or type(error).__name__}") from error
        self.end = info.state.last_seq
        if self._created not in (None, info.created) or self.end < self._index.sequence:
            await asyncio.to_thread(self._index.clear)
        self._created = info.created
