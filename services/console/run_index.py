"""A run's groups for pages: the index, the ledger and the stored responses that feed it, and how far it has got."""

import asyncio
import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ValidationError

from services.console.group_index import GroupIndex, KeptPlace
from services.console.run_source import SAMPLES, RunSource
from shared.data.rollout_files import DIRECTORY, KeptLine, RolloutRecord, files, kept_lines, read_record
from shared.schema.ledger import LedgerRecord
from shared.view.group_history import GroupRecord, kept_group

LINES = 512  # Lines that are put into the index together


@dataclass
class _ReadFile:
    """How far a file has been read. inode: tells it from a later file of the same name."""

    inode: int
    end: int = 0


@dataclass
class KeptResponses:
    """Follows the files of ``rollouts/``, which need not exist; used by one thread at a time.

    directory_only: nothing else is left of the run, so that these lines are its list of groups, too. torn: lines that are no record.
    """

    directory: Path
    index: GroupIndex
    directory_only: bool = False
    torn: int = 0
    _read: dict[str, _ReadFile] = field(default_factory=dict)
    _groups: int = 0

    def update(self) -> None:
        """Takes what was written since, and lets go of files that were removed. Raises OSError where the directory cannot be read."""
        there = files(self.directory)
        for name in self._read.keys() - {path.name for path in there}:
            self._forget(name)
        for path in there:
            self._update(path)

    def record(self, group: GroupRecord) -> RolloutRecord | None:
        """Returns a group's kept responses; None where none are kept (any more)."""
        place = self.index.kept(group.group, group.attempt)
        if place is None:
            return None
        found = read_record(self.directory / place.file, place.start, place.size)
        return found if found is not None and found.group == group.group else None

    def _update(self, path: Path) -> None:
        try:
            state = path.stat()
        except FileNotFoundError:  # removed since, to make room
            return
        read = self._read.get(path.name)
        if read is not None and (read.inode != state.st_ino or state.st_size < read.end):
            self._forget(path.name)
            read = None
        read = self._read.setdefault(path.name, read or _ReadFile(state.st_ino))
        if state.st_size > read.end:
            lines: list[KeptLine] = []
            for entry in kept_lines(path, read.end):
                if not entry.line.endswith(b"\n"):
                    break
                read.end = entry.start + len(entry.line)
                lines.append(entry)
                if len(lines) == LINES:
                    self._put(path, lines)
                    lines = []
            self._put(path, lines)

    def _put(self, path: Path, lines: list[KeptLine]) -> None:
        self.torn += sum(entry.head is None for entry in lines)
        whole = [(entry, entry.head) for entry in lines if entry.head is not None]
        if whole:
            self.index.keep([KeptPlace(head.group, head.attempt, path.name, entry.start, len(entry.line)) for entry, head in whole])
        if self.directory_only:
            self.index.add([group for entry, _ in whole if (group := self._group(entry.line)) is not None])

    def _group(self, line: bytes) -> GroupRecord | None:
        try:
            record = RolloutRecord.model_validate_json(line)
        except ValidationError:
            self.torn += 1
            return None
        self._groups += 1
        return kept_group(self._groups, record)

    def _forget(self, file: str) -> None:
        del self._read[file]
        self.index.forget_file(file)


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
