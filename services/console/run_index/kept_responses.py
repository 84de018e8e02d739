"""Where each group's kept responses lie in ``rollouts/`` of the run's directory, so that one of them is read without the others."""

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from services.console.run_index.group_index import GroupIndex, KeptPlace
from shared.data.rollout_files import KeptLine, RolloutRecord, files, kept_lines, read_record
from shared.history.group_history import GroupRecord, kept_group

LINES = 512
"""Lines that are put into the index together."""


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
            self._take(path, read)

    def _take(self, path: Path, read: _ReadFile) -> None:
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
