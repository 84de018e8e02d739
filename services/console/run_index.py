"""A run's groups for pages: the index, the ledger and the stored responses that feed it, and how far it has got."""

import asyncio
import contextlib
import time
from collections.abc import Collection

from pydantic import BaseModel

from services.console.run_source import SAMPLES, RunSource
from shared.data.rollout_files import DIRECTORY, RolloutRecord
from shared.schema.ledger import LedgerRecord
from shared.view.group_history import GroupRecord
from shared.view.group_index import GroupIndex, KeptResponses

RECORDS = 256  # Ledger records that are folded together
PIECE_SECONDS = 2.0  # The time after which others have their turn


class IndexProgress(BaseModel):
    """How much of the history has been read: ``read`` of ``of`` ledger records; ``admitted`` groups by then.

    damaged: lines of kept responses that are cut off or no record. problem: why they cannot be read at all. from_directory: there is no
    ledger; the kept responses are all there is.
    """

    read: int
    of: int
    admitted: int
    damaged: int
    problem: str
    from_directory: bool


class RunIndex:
    """The groups of a run, kept up to date by `RunSource`. ``groups``: the index; ``kept``: None without the run's directory."""

    def __init__(self, source: RunSource) -> None:
        self.groups = GroupIndex(source.scratch / "groups.sqlite")
        self.kept = None if source.directory is None else KeptResponses(source.directory / DIRECTORY, self.groups, not source.live)
        self._source, self._life, self._end = source, source.life, 0
        self._kept_lock, self._problem = asyncio.Lock(), ""
        source.followers.append(self.follow)

    def reading(self) -> IndexProgress:
        """Returns how far the index is."""
        damaged = 0 if self.kept is None else self.kept.torn
        return IndexProgress(
            read=self.groups.sequence,
            of=max(self._end, self.groups.sequence),
            admitted=self.groups.history.admitted,
            damaged=damaged,
            problem=self._problem,
            from_directory=not self._source.live,
        )

    async def follow(self) -> Collection[str]:
        """Takes what is new. Raises SourceAway, BadMessage."""
        before = self.groups.revision
        if self._source.live:
            await self._read_ledger()
            if self.groups.sequence < self._end:
                self._source.follow_again()
        await self._update_kept()
        return [SAMPLES] if self.groups.revision != before else []

    async def _read_ledger(self) -> None:
        """Takes what is new, for `PIECE_SECONDS`. A ledger that was made anew is read from its beginning."""
        source, groups, records = self._source, self.groups, list[tuple[int, LedgerRecord]]()
        self._end = await source.ledger_end()
        if self._life not in (None, source.life) or self._end < groups.sequence:
            await asyncio.to_thread(groups.clear)
        self._life, until = source.life, time.monotonic() + PIECE_SECONDS
        if groups.sequence == self._end:
            return
        async with contextlib.aclosing(source.read(source.names.ledger_stream, LedgerRecord, after=groups.sequence)) as reading:
            async for entry in reading:
                records.append(entry)
                if len(records) == RECORDS:
                    await asyncio.to_thread(groups.apply, records)
                    records = []
                    if time.monotonic() > until:
                        return
        if records:
            await asyncio.to_thread(groups.apply, records)

    async def kept_record(self, group: GroupRecord) -> RolloutRecord | None:
        """Returns a group's kept responses; None where none are kept. They may have been written after the ledger's last record."""
        if self.kept is None:
            return None
        if self.groups.kept(group.group, group.attempt) is None:
            await self._update_kept()
        return await asyncio.to_thread(self.kept.record, group)

    async def _update_kept(self) -> None:
        if self.kept is None:
            return
        async with self._kept_lock:
            try:
                await asyncio.to_thread(self.kept.update)
                self._problem = ""
            except OSError as error:
                self._problem = f"the kept responses cannot be read: {error}"
