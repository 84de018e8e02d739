"""Answers the calls of a `shared.process.worker_pool.WorkerPool` in one of its processes.

Requests and answers are frames: MessagePack behind its length in four bytes. In, once, the setup; out: ``{"waits": [verb, …], "block_s":
seconds or None}``, as `Calls` has them, or ``{"refused": [field, value, expected]}`` where the setup cannot be met. Then a request is
``[id, request]`` and is answered with ``[id, None]`` when it is taken up and with ``[id, answer]``, a map, when it is done; the request
None cancels the call of its id, which is answered at once.

The process notes which call it is executing right now (`RunningCall`), so that one that blocks it is ended alone, and one that ends it is
known. Every task of its loop notes the call that it belongs to while it runs, and every thread of the loop's executor the one that it works
for, in files that outlive the process. Tasks that a call starts belong to it. A crash is traced to its thread by `faulthandler`. Threads
that a call starts in another way are not followed: the cause of their crashes is not known.
"""

import asyncio
import contextlib
import faulthandler
import mmap
import os
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any, NoReturn, Protocol

from shared.runtime.errors import BadMessage, ConfigError
from shared.runtime.tasks import error_text, error_words
from shared.schema import codec

LONGEST_FRAME = 1 << 28  # The most bytes of a frame. Any four characters of text, read as a length, exceed it.
_HEAD = 4


def frame(value: object) -> bytes:
    """Returns the bytes of one request or answer. Raises TypeError for types that MessagePack lacks, BadMessage for a long frame."""
    body = codec.pack(value)
    if len(body) > LONGEST_FRAME:
        raise BadMessage(f"{len(body)} bytes; a request or an answer has at most {LONGEST_FRAME}")
    return len(body).to_bytes(_HEAD, "big") + body


async def read_frame(stream: asyncio.StreamReader) -> Any:
    """Returns the next frame. Raises EOFError where there is none, BadMessage for anything else."""
    try:
        head = await stream.readexactly(_HEAD)
        size = int.from_bytes(head, "big")
        if size > LONGEST_FRAME:
            raise BadMessage(f"{head!r}")
        return codec.unpack(await stream.readexactly(size))
    except asyncio.IncompleteReadError:
        raise EOFError from None


class FrameStream:
    """A worker's end of the pipes. It empties the standard input and redirects the standard output to the standard error, so that a library
    that prints or reads cannot corrupt the frames."""

    def __init__(self) -> None:
        self._process, self._answers = os.getpid(), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        self._requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what a function prints is in the log at once
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, sys.stdin.fileno())
        os.close(nothing)

    def receive(self) -> Any:
        """Returns the next request, outside of an event loop."""
        return codec.unpack(self._requests.read(int.from_bytes(self._requests.read(_HEAD), "big")))

    async def stream(self) -> asyncio.StreamReader:
        """Returns the requests from here on, for `read_frame`."""
        stream = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._requests)
        return stream

    def send(self, answer: object) -> None:
        """Sends one answer. Raises as `frame` does. A process that was forked from this one, by a call, ends: it has nothing to answer."""
        if os.getpid() != self._process:
            os._exit(1)
        self._answers.write(frame(answer))
        self._answers.flush()


CALL_ID: ContextVar[int] = ContextVar("call_id", default=0)  # The call that the running code belongs to; 0: none
NOTE_VARIABLE = "MYXO_RUNNING_CALL"  # The environment variable that names the file

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


def write_empty_note(path: Path) -> None:
    """Makes the file of a process that executes nothing."""
    path.write_bytes(_NOTE.pack(0, time.monotonic(), 0))


def executed_call(path: Path) -> int | None:
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
        path: the file, made by `write_empty_note`. limit_s: the seconds that a call may block the loop; None: as long as it likes.
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


FIRST_STEPS_SECONDS = 0.001
"""The time that a call has the event loop for itself before the next one is taken up. An async function that computes without ever waiting
then ends before the next call's deadline begins."""


TERMINAL, DEBUGGED = "MYXO_TERMINAL", "MYXO_DEBUGGED"
"""The environment variables that name the terminal for `debug`, and the file that it makes: no deadline runs once that is there."""


def debug() -> None:
    """Opens the debugger where its caller is, on the terminal of the one who started this process: its own input is the service's."""
    import pdb  # only here: it takes long

    Path(os.environ[DEBUGGED]).touch()
    terminal = os.environ[TERMINAL]
    debugger = pdb.Pdb(stdin=open(terminal), stdout=open(terminal, "w"))  # noqa: SIM115  # it reads on after this
    debugger.set_trace(sys._getframe(1))


class Calls(Protocol):
    """Base of what a worker answers calls with. ``waits``: the verbs of calls that give way to others. ``block_s``: the seconds for which
    a call may block the loop before it is ended alone; None: the service sees to it."""

    waits: Sequence[str] = ()
    block_s: float | None = None

    async def answer(self, request: dict[str, Any]) -> dict[str, object]: ...


def serve_calls(opened: Callable[[dict[str, Any]], Calls]) -> None:
    """Answers requests until the service is gone. ``opened`` makes of the setup what answers them; it may raise ConfigError."""
    channel = FrameStream()
    call_id, setup = channel.receive()
    channel.send([call_id, None])
    try:
        calls = opened(setup)
    except ConfigError as error:
        channel.send([call_id, {"refused": [error.field, str(error.value), error.expected]}])
        return
    channel.send([call_id, {"waits": list(calls.waits), "block_s": calls.block_s}])
    try:
        asyncio.run(_serve(channel, calls))  # one loop for all calls: functions may keep connections
    except* EOFError:
        pass


async def _serve(channel: FrameStream, calls: Calls) -> None:
    """Serves calls. Raises EOFError when the service is gone; an exception of a call ends the process."""
    requests, tasks, serving = await channel.stream(), dict[int, asyncio.Task[None]](), asyncio.current_task()
    assert serving is not None
    if path := os.environ.get(NOTE_VARIABLE):
        RunningCall(Path(path), calls.block_s).follow(asyncio.get_running_loop())
    async with asyncio.TaskGroup() as running:
        while True:
            call_id, request = await read_frame(requests)
            if request is None:  # the call is late, or is not waited for any longer
                if call_id in tasks:
                    tasks[call_id].cancel()
                channel.send([call_id, {"error": "cancelled"}])
                continue
            channel.send([call_id, None])
            context = copy_context()
            context.run(CALL_ID.set, call_id)
            tasks[call_id] = running.create_task(_call(channel, calls, serving, call_id, request), context=context)
            tasks[call_id].add_done_callback(lambda _, call_id=call_id: tasks.pop(call_id))  # type: ignore[misc]
            if request.get("verb") in calls.waits:
                await asyncio.sleep(FIRST_STEPS_SECONDS)


async def _call(channel: FrameStream, calls: Calls, serving: asyncio.Task[None], call_id: int, request: dict[str, Any]) -> None:
    try:
        answer = await calls.answer(request)
    except asyncio.CancelledError:  # late, or the function's own doing
        if serving.cancelling():  # the process ends, which is no answer
            return
        answer = {"error": "the call was cancelled"}
    except (BlockedCall, CallExit, SystemExit, KeyboardInterrupt, BaseExceptionGroup) as error:
        answer = {"error": error_text(error), "blocked": is_blocked(error)}
    channel.send([call_id, answer])
