"""The lock between the training, which changes a model's parameters, and a thread that reads them for a push."""

import threading
import time

import torch

from shared.runtime.errors import DeadlineExceeded


class WeightReadLock:
    """The lock on one model's parameters, with at most one read at a time.

    Attributes:
        stall: seconds that a caller has waited for the newest read. waiting_since: when it began to; None: none did.
    """

    def __init__(self) -> None:
        self.stall = 0.0
        self.waiting_since: float | None = None
        self._what, self._seconds = "", 0.0
        self._over = threading.Event()
        self._over.set()
        self._read: torch.cuda.Event | None = None

    def begin(self, what: str, seconds: float) -> None:
        """Begins a read. ``what``: names it in errors. ``seconds``: how long a caller that changes parameters waits for its end."""
        self.stall, self.waiting_since, self._what, self._seconds = 0.0, None, what, seconds
        self._over.clear()

    def over(self) -> None:
        """Ends the read; on a GPU it ends in the order of the current stream. A second call does nothing."""
        if self._over.is_set():
            return
        if torch.cuda.is_available():
            self._read = torch.cuda.Event()
            self._read.record()
        if (since := self.waiting_since) is not None:
            self.stall += time.monotonic() - since
        self._over.set()

    def wait(self, next_action: str) -> None:
        """Returns once no read is under way; the current stream's further work then comes after the last one.

        ``next_action``: what the caller is about to do. Raises DeadlineExceeded."""
        if not self._over.is_set():
            self.waiting_since = time.monotonic()
            if not self._over.wait(self._seconds):
                raise DeadlineExceeded(f"the end of {self._what}", "the thread that reads the weights", self._seconds, f"no {next_action}")
        if self._read is not None:
            torch.cuda.current_stream().wait_event(self._read)
            self._read = None
