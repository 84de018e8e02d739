"""The numbers of a run's metrics in its directory, read as they grow: ``metrics.jsonl`` beside TensorBoard's event files.

Each line is ``[seconds since the epoch, step, {metric: value}]``, as Python's ``json`` writes it. A run that was trained before there were
such lines has event files alone: the package tensorboard reads those, and a trainer that resumes makes lines of them.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

METRIC_LINES = "metrics.jsonl"
EVENT_FILES = "events.out.tfevents.*"
NO_READER = "has the metrics of an earlier release, in event files: install the package tensorboard where they are to be read"


class Scalar(NamedTuple):
    """One number. ``at``: seconds since the epoch."""

    tag: str
    step: int
    value: float
    at: float


@dataclass
class MetricDirectory:
    """The metric files of one directory, not of those below it. ``unreadable``: why they cannot be read; empty where they can."""

    path: Path
    unreadable: str = ""
    _inode: int = 0
    _offset: int = 0
    _loaders: dict[Path, Any] = field(default_factory=dict)

    def read(self) -> Iterator[Scalar]:
        """Yields the numbers that were added since it was last called."""
        self.unreadable = ""
        try:
            file = (self.path / METRIC_LINES).open("rb")
        except (FileNotFoundError, NotADirectoryError):
            yield from self._of_events()
            return
        except OSError as error:  # another user's
            self.unreadable = f"has {METRIC_LINES}, which cannot be read: {error.strerror}"
            return
        with file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._offset:  # a trainer that resumed has written it anew
                self._inode, self._offset = state.st_ino, 0
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                yield from _scalars(line)
                self._offset += len(line)

    def _of_events(self) -> Iterator[Scalar]:
        files = sorted(self.path.glob(EVENT_FILES))
        if not files:
            return
        try:
            from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        except ModuleNotFoundError:
            self.unreadable = NO_READER
            return
        for file in files:
            if file not in self._loaders:
                self._loaders[file] = LegacyEventFileLoader(str(file))
            for event in self._loaders[file].Load():
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        yield Scalar(value.tag, event.step, value.simple_value, event.wall_time)


def _scalars(line: bytes) -> Iterator[Scalar]:
    """Yields the numbers of a line; none of one that a trainer that died has left half written."""
    try:
        at, step, values = json.loads(line)
        found = [Scalar(tag, int(step), float(value), float(at)) for tag, value in values.items()]
    except (ValueError, TypeError, AttributeError, OverflowError):
        return
    yield from (scalar for scalar in found if math.isfinite(scalar.at))
