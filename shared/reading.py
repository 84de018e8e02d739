"""A progress bar for reading long files: on standard error, only on a terminal, only where it takes long."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

PATIENCE_SECONDS = 1.0
"""What is done sooner shows no bar."""


class Reading:
    """Shows how far something has got, as a context manager.

    Args:
        what: in words. total: where it ends, in the unit of `at`.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._began = time.monotonic()
        self._progress: Progress | None = None

    def at(self, done: int) -> None:
        """So far. Cheap, but looks at the clock: call it now and then, not for every line."""
        if self._progress is None:
            if time.monotonic() - self._began < PATIENCE_SECONDS:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
            self._progress.add_task(self._what, total=self._total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
