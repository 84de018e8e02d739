"""Which call a worker process is executing right now, so that one that blocks it is ended alone, and one that ends it is known.

Every task of the process's loop notes the call that it belongs to while it runs, in a file that outlives the process. Tasks that a call
starts belong to it. Threads are not followed: with them nobody knows which call was the cause.
"""

import asyncio
import mmap
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

CALL_ID: ContextVar[int] = ContextVar("call_id", default=0)
"""The call that the running code belongs to; 0: none."""

VARIABLE = "MYXO_RUNNING_CALL"
"""The environment variable that names the file."""

_BYTES = 8

TICK_S = 0.1
"""The pause between two signs of life of the loop."""


class BlockedCall(BaseException):
    """The call blocks its process. No Exception: code that goes on after any error must not go on after this one."""


def write_empty(path: Path) -> None:
    """Makes the file of a process that executes nothing."""
    path.write_bytes(bytes(_BYTES))


def read(path: Path) -> int:
    """Returns the call that a process was executing when it ended; 0 for none."""
    try:
        return int.from_bytes(path.read_bytes(), "little")
    except OSError:
        return 0


class RunningCall:
    """Notes the running call, and interrupts one that blocks the loop.

    Args:
        path: the file, made by `write_empty`. limit_s: the seconds that a call may block the loop; None: as long as it likes.
    """

    def __init__(self, path: Path, limit_s: float | None) -> None:
        with path.open("r+b") as file:
            self._note = mmap.mmap(file.fileno(), _BYTES)
        self._limit_s, self._seen = limit_s, time.monotonic()

    def note(self, call_id: int) -> None:
        """Says that this call is being executed; 0: none is."""
        self._note[:] = call_id.to_bytes(_BYTES, "little")

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follows the running loop from here on, to be called in the main thread."""
        loop.set_task_factory(self._task)
        if self._limit_s is not None:
            signal.signal(signal.SIGUSR2, self._interrupt)
            self._tick(loop)
            threading.Thread(target=self._watch, args=(self._limit_s,), name="blocked-calls", daemon=True).start()

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        call_id = options["context"].get(CALL_ID, 0) if options.get("context") is not None else CALL_ID.get()
        return asyncio.Task(_Noted(coro, self.note, call_id) if call_id else coro, loop=loop, **options)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._seen = time.monotonic()
        loop.call_later(TICK_S, self._tick, loop)

    def _watch(self, limit_s: float) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            time.sleep(min(limit_s / 4, 1.0))
            if time.monotonic() - self._seen > limit_s:
                signal.pthread_kill(main, signal.SIGUSR2)

    def _interrupt(self, *_: object) -> None:
        blocked_s = time.monotonic() - self._seen
        if self._limit_s is not None and blocked_s > self._limit_s and int.from_bytes(self._note[:], "little"):
            self._seen = time.monotonic()  # the next call that runs has the whole time, too
            raise BlockedCall(f"it held up its process for {blocked_s:.0f} s: what computes or waits so long belongs into a thread")


class _Noted(Coroutine[Any, Any, Any]):
    """A coroutine each of whose steps notes the call that it belongs to."""

    def __init__(self, coro: Coroutine[Any, Any, Any], note: Callable[[int], None], call_id: int) -> None:
        self._coro, self._note, self._call_id = coro, note, call_id

    def send(self, value: Any) -> Any:
        self._note(self._call_id)
        try:
            return self._coro.send(value)
        finally:
            self._note(0)

    def throw(self, *error: Any) -> Any:
        self._note(self._call_id)
        try:
            return self._coro.throw(*error)
        finally:
            self._note(0)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()
