"""Writes the responses of ended groups to disk (`shared.data.rollout_files`), in a thread of its own.

Nothing here can hold up or end a run: what the disk does not take, or not fast enough, is left out, counted by reason and logged. Memory is
bound by `QUEUE_BYTES`, the disk by the run's ``keep_rollouts_bytes``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from services.buffer.ended_groups import EndedGroup
from shared.data import rollout_files
from shared.data.prompts import Prompt
from shared.data.rollout_files import RolloutReader, RolloutRecord
from shared.schema import sample

QUEUE_BYTES = 32 << 20
"""Payloads that wait for the disk at most."""

QUEUE_GROUPS = 1 << 14
"""Groups that do."""

FILE_BYTES = 64 << 20
"""About where a file ends and the next one begins; files are removed whole, so a small bound has smaller ones."""

FILES = 8
"""Files at least that the bound is divided into."""

RETRY_SECONDS = 10.0
"""How long nothing is written after the disk has refused something."""

LOG_SECONDS = 30.0
"""The least time between two log lines about what is not kept."""

DISK, SLOW_DISK, TOO_LARGE, UNREADABLE = "disk", "slow disk", "too large", "unreadable"
"""Why a group is not kept: the disk refuses it, does not keep up, the bound is smaller, what the store had is no sample."""


@dataclass(frozen=True)
class WriteJob:
    """A group to write, with its payload or, where it has none, its prompt. ``again``: another buffer may have written it."""

    group: EndedGroup
    blobs: Sequence[bytes] = ()
    prompt: Prompt | None = None
    again: bool = False


class RolloutWriter:
    """See the module's docstring. Methods are for the buffer's own thread.

    Args:
        directory: ``rollouts/`` of the run. bound: bytes of it. tokens: whether token ids and log-probs are kept, too.

    ``written``: groups; ``used``: bytes of the directory; ``skipped``: groups that are not kept, by reason.
    """

    def __init__(self, directory: Path, bound: int, tokens: bool, log: Any) -> None:
        self._directory, self._bound, self._tokens, self._log = directory, bound, tokens, log
        self._jobs: queue.SimpleQueue[WriteJob] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = self._queued = 0
        self._file: IO[bytes] | None = None
        self._path: Path | None = None
        self._file_bytes = 0
        self._sizes: dict[Path, int] = {}  # of the files, oldest first
        self._known: set[tuple[str, int]] | None = None
        self._refused_until = self._logged = float("-inf")
        self.written = self.used = 0
        self.skipped: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="rollout-writer", daemon=True)  # a disk that hangs keeps nobody from leaving

    @property
    def idle(self) -> bool:
        """Whether all that was taken has been written or left out."""
        return not self._queued

    def offer(self, job: WriteJob) -> None:
        """Takes a group to be written; leaves it out where too much waits for the disk."""
        size = sum(map(len, job.blobs))
        with self._lock:
            full = self._queued >= QUEUE_GROUPS or (self._queued and self._queued_bytes + size > QUEUE_BYTES)
            if not full:
                self._queued, self._queued_bytes = self._queued + 1, self._queued_bytes + size
        if full:
            self.skip(SLOW_DISK)
            return
        if not self._thread.is_alive():
            self._thread.start()
        self._jobs.put(job)

    def skip(self, reason: str, error: object = "") -> None:
        """Counts a group that is not kept, and says so now and then."""
        with self._lock:
            self.skipped[reason] += 1
            now = time.monotonic()
            if now - self._logged < LOG_SECONDS:
                return
            self._logged = now
        self._log.warning("rollouts_not_kept", reason=reason, error=str(error), skipped=dict(self.skipped), directory=str(self._directory))

    # --- in the thread

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                self._write(job)
            except OSError as error:
                self._refused_until = time.monotonic() + RETRY_SECONDS
                self.skip(DISK, error)
            except Exception as error:  # whatever a payload holds: it costs this group's responses and nothing else
                self.skip(UNREADABLE, f"{job.group.group}: {type(error).__name__}: {error}")
            finally:
                with self._lock:
                    self._queued, self._queued_bytes = self._queued - 1, self._queued_bytes - sum(map(len, job.blobs))

    def _write(self, job: WriteJob) -> None:
        if time.monotonic() < self._refused_until:
            self.skip(DISK)
            return
        if job.again and (job.group.group, job.group.attempt) in self._written_before():
            return
        line = record_of(job, self._tokens).line()
        if len(line) > self._bound:
            self.skip(TOO_LARGE, f"{job.group.group}: {len(line)} bytes")
            return
        file = self._file_for(len(line))
        self._make_room(len(line))
        try:
            wrote = file.write(line)
            if wrote != len(line):
                raise OSError(f"{self._path}: {wrote} of {len(line)} bytes written")
        except OSError:
            self._abandon(file)
            raise
        assert self._path is not None  # of the file
        self._file_bytes += len(line)
        self._sizes[self._path] = self._file_bytes
        self.used = sum(self._sizes.values())
        self.written += 1

    def _written_before(self) -> set[tuple[str, int]]:
        if self._known is None:
            self._known = {(head.group, head.attempt) for head in RolloutReader(self._directory).heads()}
        return self._known

    def _file_for(self, size: int) -> IO[bytes]:
        """The file that a line of ``size`` bytes goes to; files that exist are never written to."""
        if self._file is not None and self._file_bytes + size <= min(FILE_BYTES, self._bound // FILES):
            return self._file
        if self._file is not None:
            self._file.close()
            self._file = None
        self._directory.mkdir(parents=True, exist_ok=True)
        there = rollout_files.files(self._directory)
        self._path = rollout_files.path_of(self._directory, rollout_files.number(there[-1]) + 1 if there else 0)
        self._file, self._file_bytes = self._path.open("xb", buffering=0), 0
        self._sizes = {path: path.stat().st_size for path in there} | {self._path: 0}
        return self._file

    def _make_room(self, size: int) -> None:
        """Removes the oldest files until ``size`` bytes fit under the bound."""
        for path in list(self._sizes):
            if sum(self._sizes.values()) + size <= self._bound or path == self._path:
                return
            path.unlink(missing_ok=True)
            del self._sizes[path]

    def _abandon(self, file: IO[bytes]) -> None:
        """Takes back what was written of a line, as far as the disk lets us; the next one goes to a new file."""
        self._file = None
        with file:
            file.truncate(self._file_bytes)
        if not self._file_bytes and self._path is not None:
            self._path.unlink()


def record_of(job: WriteJob, tokens: bool) -> RolloutRecord:
    """The record of a group. Raises BadMessage where its payload is no samples, ValueError where they are not those of the ledger."""
    group, samples = job.group, sample.decode(job.blobs)
    if len(samples) != len(group.rewards) and group.keys:
        raise ValueError(f"{len(samples)} samples in the store, {len(group.rewards)} rewards in the ledger")
    first = samples[0] if samples else None
    if first is not None:
        prompt, label, metadata = first.prompt_text, first.label, first.metadata
    elif job.prompt is not None:
        prompt, label, metadata = job.prompt.content, job.prompt.label, job.prompt.metadata
    else:
        prompt, label, metadata = None, None, {}
    return RolloutRecord.model_construct(
        group=group.group,
        attempt=group.attempt,
        status=group.status,
        dataset=group.dataset,
        step=group.step,
        version=group.version,
        mask_below=group.mask_below,
        reason=group.reason,
        at=group.at,
        prompt=prompt,
        label=label,
        metadata=metadata,
        samples=[
            rollout_files.sample_of(
                one,
                samples[0],
                group.rewards[position],
                group.parts[position] if group.parts else {},
                removed=position in group.removed,
                stale=position in group.stale,
                tokens=tokens,
            )
            for position, one in enumerate(samples)
        ],
    )
