"""A run's groups for pages: the index, what feeds it, and how far it has got."""

import asyncio
from collections.abc import Collection
from pathlib import Path

from pydantic import BaseModel

from services.console.change_feed import SAMPLES
from services.console.run_index.group_index import GroupIndex
from services.console.run_index.kept_responses import KeptResponses
from services.console.run_index.ledger_follower import LedgerFollower
from services.console.run_source import RunSource
from shared.data.rollout_files import DIRECTORY, RolloutRecord
from shared.history.group_history import GroupRecord


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
        self.kept = _kept(source.directory, self.groups, directory_only=not source.live)
        self._source, self._ledger = source, LedgerFollower(source, self.groups)
        self._kept_lock, self._problem = asyncio.Lock(), ""
        source.followers.append(self.follow)

    def reading(self) -> IndexProgress:
        """Returns how far the index is."""
        damaged = 0 if self.kept is None else self.kept.torn
        return IndexProgress(
            read=self.groups.sequence,
            of=max(self._ledger.end, self.groups.sequence),
            admitted=self.groups.history.admitted,
            damaged=damaged,
            problem=self._problem,
            from_directory=not self._source.live,
        )

    async def follow(self) -> Collection[str]:
        """Takes what is new. Raises SourceAway, BadMessage."""
        before = self.groups.revision
        if self._source.live:
            await self._ledger.catch_up()
            if self._ledger.behind:
                self._source.follow_again()
        await self._update_kept()
        return [SAMPLES] if self.groups.revision != before else []

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


def _kept(directory: Path | None, index: GroupIndex, *, directory_only: bool) -> KeptResponses | None:
    return None if directory is None else KeptResponses(directory / DIRECTORY, index, directory_only)
