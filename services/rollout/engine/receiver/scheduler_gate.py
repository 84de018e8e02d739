"""A gate in the scheduler's loop, closed for moments in which another thread of its process needs the interpreter.

An idle scheduler spins, and every call of another thread that lets go of the interpreter waits a tenth of a millisecond to have it back:
beginning a push makes thirty of them. A scheduler that waits at the gate leaves it alone. It delays a step of the engine by
`CLOSED_SECONDS` at most, and changes nothing else.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

CLOSED_SECONDS = 0.005
"""The longest that the gate stays closed, whatever the other thread does."""


class SchedulerGate:
    """One scheduler's gate. Any thread may close it; it opens once nobody keeps it closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._until = 0.0
        self._closing, self._closed_by = threading.Lock(), 0

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Keeps the gate closed in the body, or for `CLOSED_SECONDS`."""
        with self._closing:
            self._closed_by += 1
            self._until = time.monotonic() + CLOSED_SECONDS
            self._open.clear()
        try:
            yield
        finally:
            with self._closing:
                self._closed_by -= 1
                if not self._closed_by:
                    self._open.set()

    def wait(self) -> None:
        """Returns once the gate is open; on the scheduler's thread."""
        if not self._open.is_set() and (left := self._until - time.monotonic()) > 0:
            self._open.wait(left)

    def install(self, scheduler: Any) -> bool:
        """Puts the gate before the scheduler's processing of requests, once in each turn of its loop. Returns whether it could be."""
        process = getattr(scheduler, "process_input_requests", None)
        if process is None:
            return False

        @functools.wraps(process)
        def gated(*arguments: Any, **options: Any) -> Any:
            self.wait()
            return process(*arguments, **options)

        scheduler.process_input_requests = gated
        return True
