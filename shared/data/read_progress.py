"""Progress of reading long files, on standard error and only where it takes long: a bar on a terminal, now and then a line elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from shared.runtime.safe_text import say

PATIENCE_SECONDS = 2.0  # Work that ends sooner shows nothing
LINE_SECONDS = 10.0  # Time between two lines where there is no terminal


class ReadProgress:
    """A context manager that shows the progress of reading.

    Args:
        what: in words. total: where it ends, in the unit of `at`. amount: writes such a number.
    """

    def __init__(self, what: str, total: int, amount: Callable[[int], str] = "{:,}".format) -> None:
        self._what, self._total, self._amount = what, total, amount
        self.shown = False  # True once anything was shown
        self._due = time.monotonic() + PATIENCE_SECONDS
        self._progress: Progress | None = None

    def at(self, done: int) -> None:
        """Shows how much is done. It is cheap, but looks at the clock: call it now and then, not for every line."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done)
        elif time.monotonic() < self._due:
            return
        elif sys.stderr.isatty():
            self.shown = True
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.add_task(self._what, total=self._total, completed=done)
            self._progress.start()
        else:
            self._due, self.shown = time.monotonic() + LINE_SECONDS, True
            progress = f"{self._amount(done)} of {self._amount(self._total)}"
            say(f"myxo: {self._what}: {progress} ({done / max(self._total, 1):.0%})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
