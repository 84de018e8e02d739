"""Who reads the parameters beside the training: whoever is about to change them waits until that is over."""

import threading
import time

import torch

from shared.runtime.errors import DeadlineExceeded


class WeightRead:
    """One reading, from `WeightReadLock.begin` to `over`.

    Args:
        what: is being read for, and by when it must be over: for the errors. stall: seconds that somebody waited for it.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.stall = 0.0
        self._over = threading.Event()
        self._read: torch.cuda.Event | None = None
        self.waiting_since: float | None = None

    def over(self) -> None:
        """Everything has been read, or on a GPU will have been in the order of the current stream. Again is fine."""
        if self._over.is_set():
            return
        if torch.cuda.is_available():
            self._read = torch.cuda.Event()
            self._read.record()
        if (since := self.waiting_since) is not None:
            self.stall += time.monotonic() - since
        self._over.set()

    def wait(self, seconds: float) -> bool:
        """Whether it was over within ``seconds``; then the current stream's further work comes after it."""
        if not self._over.is_set():
            self.waiting_since = time.monotonic()
            if not self._over.wait(seconds):
                return False
        if self._read is not None:
            torch.cuda.current_stream().wait_event(self._read)
        return True


class WeightReadLock:
    """The readings of one model, at most one at a time."""

    def __init__(self) -> None:
        self._reading: WeightRead | None = None
        self._seconds = 0.0

    def begin(self, what: str, seconds: float) -> WeightRead:
        """Args: what: for errors. seconds: that whoever changes parameters waits for its end."""
        self._reading, self._seconds = WeightRead(what), seconds
        return self._reading

    def wait(self, next_action: str) -> None:
        """Returns once nobody reads. ``next_action``: what the caller is about to do. Raises DeadlineExceeded."""
        reading, self._reading = self._reading, None
        if reading is not None and not reading.wait(self._seconds):
            raise DeadlineExceeded(f"the end of {reading.what}", "the thread that reads the weights", self._seconds, f"no {next_action}")
