"""Writes the responses of ended groups to disk (`shared.data.rollout_files`), bound by the run's ``keep_rollouts_bytes``."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from services.buffer.ended_groups import EndedGroup
from shared.data import rollout_files
from shared.data.prompts import Prompt
from shared.data.rollout_files import RolloutReader, RolloutRecord
from shared.runtime.errors import BadMessage
from shared.schema import sample

FILE_BYTES = 64 << 20
"""The approximate size of a file; files are removed whole, so a small bound has smaller ones."""

FILES = 8
"""Files at least that the bound is divided into."""

RETRY_SECONDS = 10.0
"""The pause in writing after the disk has refused a write."""

DISK, TOO_LARGE, UNREADABLE = "disk", "too large", "unreadable"
"""The reasons for not keeping a group: the disk refuses it, it exceeds the bound, its payload holds no samples."""


class RolloutNotKept(Exception):
    """The responses of a group are not kept, for ``reason``; the text says more."""

    def __init__(self, reason: str, error: object = "") -> None:
        super().__init__(str(error))
        self.reason = reason


class RolloutWriter:
    """Writes groups; used by one thread at a time.

    Args:
        directory: ``rollouts/`` of the run. bound: bytes of it. tokens: whether token ids and log-probs are kept, too.

    ``written``: groups; ``used``: bytes of the directory.
    """

    def __init__(self, directory: Path, bound: int, tokens: bool) -> None:
        self._directory, self._bound, self._tokens = directory, bound, tokens
        self._file: IO[bytes] | None = None
        self._sizes: dict[Path, int] = {}  # of the files, oldest first; the last is the one that is written
        self._known: set[tuple[str, int]] | None = None
        self._refused_at = float("-inf")
        self.written = self.used = 0

    def write(self, group: EndedGroup, blobs: Sequence[bytes], prompt: Prompt | None = None) -> None:
        """Writes a group with its payload or, where it has none, its prompt. Raises RolloutNotKept, whatever is wrong."""
        if time.monotonic() < self._refused_at + RETRY_SECONDS:
            raise RolloutNotKept(DISK)
        try:
            if not (group.again and self._is_written(group)):
                self._append(group, rollout_record(group, blobs, prompt, self._tokens).line())
        except OSError as error:
            self._refused_at = time.monotonic()
            raise RolloutNotKept(DISK, error) from error
        except RolloutNotKept:
            raise
        except Exception as error:  # a bad payload loses this group's responses and nothing else
            raise RolloutNotKept(UNREADABLE, f"{group.record.group}: {type(error).__name__}: {error}") from error

    def _is_written(self, group: EndedGroup) -> bool:
        if self._known is None:
            self._known = {(head.group, head.attempt) for head in RolloutReader(self._directory).heads()}
        return (group.record.group, group.record.attempt) in self._known

    def _append(self, group: EndedGroup, line: bytes) -> None:
        if len(line) > self._bound:
            raise RolloutNotKept(TOO_LARGE, f"{group.record.group}: {len(line)} bytes")
        file, path = self._file_for(len(line))
        self._make_room(len(line))
        try:
            wrote = file.write(line)
            if wrote != len(line):
                raise OSError(f"{path}: {wrote} of {len(line)} bytes written")
        except OSError:
            self._abandon(file, path)
            raise
        self._sizes[path] += len(line)
        self.used = sum(self._sizes.values())
        self.written += 1

    def _file_for(self, size: int) -> tuple[IO[bytes], Path]:
        """Returns the file that a line of ``size`` bytes goes to; files of an earlier process are never written to."""
        if self._file is not None:
            path = next(reversed(self._sizes))
            if self._sizes[path] + size <= min(FILE_BYTES, self._bound // FILES):
                return self._file, path
            self._file.close()
            self._file = None
        self._directory.mkdir(parents=True, exist_ok=True)
        there = rollout_files.files(self._directory)
        path = rollout_files.path_of(self._directory, int(there[-1].stem) + 1 if there else 0)
        self._file = path.open("xb", buffering=0)
        self._sizes = {other: other.stat().st_size for other in there} | {path: 0}
        return self._file, path

    def _make_room(self, size: int) -> None:
        """Removes the oldest files until ``size`` bytes fit under the bound."""
        for path in list(self._sizes)[:-1]:
            if sum(self._sizes.values()) + size <= self._bound:
                return
            path.unlink(missing_ok=True)
            del self._sizes[path]

    def _abandon(self, file: IO[bytes], path: Path) -> None:
        """Takes back what was written of a line, as far as the disk lets us; the next one goes to a new file."""
        self._file = None
        with file:
            file.truncate(self._sizes[path])
        if not self._sizes[path]:
            path.unlink()


def rollout_record(group: EndedGroup, blobs: Sequence[bytes], prompt: Prompt | None, tokens: bool) -> RolloutRecord:
    """Returns a group's whole record. Raises BadMessage for a payload of no samples, ValueError where they are not the ledger's."""
    try:
        samples = sample.decode(blobs)
    except BadMessage:  # perhaps it was given up for that
        if group.rewards:
            raise
        samples = []
    if group.rewards and len(samples) != len(group.rewards):
        raise ValueError(f"{len(samples)} samples in the store, {len(group.rewards)} rewards in the ledger")
    if samples:
        asked = {"prompt": samples[0].prompt_text, "label": samples[0].label, "metadata": samples[0].metadata}
    elif prompt is not None:
        asked = {"prompt": prompt.content, "label": prompt.label, "metadata": prompt.metadata}
    else:
        asked = {}
    written = [
        rollout_files.sample_of(
            item,
            samples[0],
            group.rewards[position] if group.rewards else None,
            group.parts[position] if group.parts else {},
            removed=position in group.removed,
            stale=position in group.stale,
            tokens=tokens,
        )
        for position, item in enumerate(samples)
    ]
    return group.record.model_copy(update={**asked, "samples": written})
