"""Which call a worker process is executing right now, so that one that blocks it is ended alone, and one that ends it is known.

Every task of the process's loop notes the call that it belongs to while it runs, and every thread of the loop's executor the one that it
works for, in files that outlive the process. Tasks that a call starts belong to it. A crash is traced to its thread by `faulthandler`.
Threads that a call starts in another way are not followed: the cause of their crashes is not known.
"""

import asyncio
import contextlib
import faulthandler
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

from shared.runtime.tasks import error_words

CALL_ID: ContextVar[int] = ContextVar("call_id", default=0)  # The call that the running code belongs to; 0: none
VARIABLE = "MYXO_RUNNING_CALL"  # The environment variable that names the file

# The file: the call that the loop executes, its last sign of life (`time.monotonic`, one clock for all processes), and its thread
_NOTE = struct.Struct("<qdQ")

# What else is in the file's directory: `faulthandler`'s words, and a file for each thread of the executor that works for a call
_CRASH, _THREADS = "crash", "threads"

_CRASHED_THREAD = re.compile(r"^Current thread 0x([0-9a-f]+)", re.MULTILINE)

TICK_S = 0.1  # The pause between two signs of life of the loop
THREADS = 1024  # The most threads of the loop's executor: calls whose threads never end have to leave some to the others


class BlockedCall(BaseException):
    """The call blocks its process. No Exception: code that continues after any error must not continue after this one."""


def is_blocked(error: BaseException) -> bool:
    """Returns whether a call failed since it blocked its process: in a task of a group, perhaps."""
    return isinstance(error, BlockedCall) or (isinstance(error, BaseExceptionGroup) and error.subgroup(BlockedCall) is not None)


class CallExit(BaseException):
    """The call wanted to end its process, which others are in, too."""


def write_empty(path: Path) -> None:
    """Makes the file of a process that executes nothing."""
    path.write_bytes(_NOTE.pack(0, time.monotonic(), 0))


def read(path: Path) -> int | None:
    """Returns the call that a process was executing when it ended, 0 for none; None where a thread crashed that is not followed."""
    try:
        executed, _, loop_thread = _NOTE.unpack(path.read_bytes())
        words = path.with_name(_CRASH)
        crashed = _CRASHED_THREAD.search(words.read_text()) if words.exists() else None
        if crashed is None or int(crashed[1], 16) == loop_thread:
            return int(executed)
        noted = path.with_name(_THREADS) / crashed[1].lstrip("0")
        return int(noted.read_text()) if noted.exists() else None
    except (OSError, ValueError, struct.error):
        return 0


def crash_words(path: Path) -> str:
    """Returns what a process crashed by and where, as the end of a sentence; nothing for one that has not."""
    try:
        words = path.with_name(_CRASH).read_text()
    except OSError:
        return ""
    crashed = _CRASHED_THREAD.search(words)
    frames = [] if crashed is None else words[crashed.end() :].splitlines()[1:2]
    return ", ".join([": " + words.partition("\n")[0], *(frame.strip() for frame in frames)]) if words else ""


def silent_s(path: Path) -> float:
    """Returns the seconds since the loop's last sign of life."""
    return time.monotonic() - float(_NOTE.unpack(path.read_bytes())[1])


class RunningCall:
    """Notes the running call, and interrupts one that blocks the loop.

    Args:
        path: the file, made by `write_empty`. limit_s: the seconds that a call may block the loop; None: as long as it likes.
    """

    def __init__(self, path: Path, limit_s: float | None) -> None:
        with path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), _NOTE.size)
        self._limit_s, self._seen, self._noted = limit_s, time.monotonic(), 0
        self._threads, self._crash = path.with_name(_THREADS), path.with_name(_CRASH).open("w")

    def note(self, call_id: int) -> None:
        """Says that the loop executes this call; 0: none."""
        self._noted = call_id
        _NOTE.pack_into(self._file, 0, call_id, self._seen, threading.main_thread().ident)

    @contextlib.contextmanager
    def thread(self, call_id: int) -> Iterator[None]:
        """Notes, while the body runs, that this thread works for a call."""
        note = self._threads / f"{threading.get_ident():x}"
        note.write_text(str(call_id))
        try:
            yield
        finally:
            note.unlink(missing_ok=True)

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follows the running loop from here on, to be called in the main thread."""
        self._threads.mkdir()
        faulthandler.enable(self._crash)  # of all threads: else it does not say which one crashed
        loop.set_task_factory(self._task)
        loop.set_default_executor(_NotedThreads(self.thread))
        if self._limit_s is not None:
            os._exit = _exit_of_call(os._exit, os.getpid())  # type: ignore[assignment]
            signal.signal(signal.SIGUSR2, self._interrupt)
            self._tick(loop)
            threading.Thread(target=self._watch, args=(self._limit_s,), name="blocked-calls", daemon=True).start()

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        call_id = options["context"].get(CALL_ID, 0) if options.get("context") is not None else CALL_ID.get()
        return asyncio.Task(_Noted(coro, self.note, call_id) if call_id else coro, loop=loop, **options)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._seen = time.monotonic()
        self.note(0)
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
        if self._limit_s is not None and blocked_s > self._limit_s and self._noted:
            self._seen = time.monotonic()  # the next call that runs has the whole time, too
            raise BlockedCall(f"it held up its process for {blocked_s:.0f} s: what computes or waits so long belongs into a thread")


class _Noted(Coroutine[Any, Any, Any]):
    """A coroutine each of whose steps notes the call that it belongs to, and none of which ends the process."""

    def __init__(self, coro: Coroutine[Any, Any, Any], note: Callable[[int], None], call_id: int) -> None:
        self._coro, self._note, self._call_id = coro, note, call_id

    def send(self, value: Any) -> Any:
        return self._step(self._coro.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coro.throw, *error)

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        self._note(self._call_id)
        try:
            return step(*given)
        except (SystemExit, KeyboardInterrupt) as error:  # out of a task, asyncio lets these end the loop
            raise CallExit(error_words(error)) from error
        finally:
            self._note(0)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()


class _NotedThreads(ThreadPoolExecutor):
    """An executor whose threads note the call that they work for. ``thread``: as `RunningCall.thread`."""

    def __init__(self, thread: Callable[[int], contextlib.AbstractContextManager[None]]) -> None:
        super().__init__(THREADS, "call")
        self._thread = thread

    def submit(self, fn: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        call_id = CALL_ID.get()

        def work() -> Any:
            with self._thread(call_id):
                return fn(*args, **keywords)

        return super().submit(work)


def _exit_of_call(exit_process: Callable[[int], NoReturn], process: int) -> Callable[[int], NoReturn]:
    """Returns what stands for ``os._exit`` in a process of many calls: it fails the call. Processes that are forked from it do exit."""

    def exit_call(status: int) -> NoReturn:
        if os.getpid() == process and CALL_ID.get():
            raise CallExit(f"os._exit({status})")
        exit_process(status)

    return exit_call
