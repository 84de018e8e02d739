"""Tasks and threads of a service, watched for failures and cancelled until they have ended; deadlines that pause while engines sleep."""

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog

from shared.runtime import failure_summary
from shared.runtime.errors import BadInput, MyxoError

T = TypeVar("T")

REPEAT_SECONDS = 0.2  # The seconds after which a task that still runs is cancelled again


def doubling(first: float, longest: float) -> Iterator[float]:
    """Yields the pauses between tries, in seconds without end: ``first``, and then twice the one before, at most ``longest``."""
    while True:
        yield first
        first = min(2 * first, longest)


async def cancelled(tasks: Iterable[asyncio.Task[Any]], deadline: float = 10.0) -> None:
    """Cancels tasks and waits until they have ended; their errors are dropped.

    One request is not enough: `asyncio.wait_for` (before Python 3.12) swallows a cancellation that arrives just as its own wait ends,
    and a loop around it continues for ever. A task that outlives ``deadline`` seconds of requests is logged and left alone.
    """
    end = time.monotonic() + deadline
    tasks = set(tasks)
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=REPEAT_SECONDS)
        if left and time.monotonic() > end:
            structlog.get_logger().error("tasks_not_ended", tasks=sorted(task.get_name() for task in left), seconds=deadline)
            break
    for task in tasks - left:
        task.cancelled() or task.exception()  # else asyncio would report it as never retrieved


async def gathered(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of several things at once, in order. The first error cancels the others, and is raised once they have ended."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(tasks)


async def settled(given: Any) -> Any:
    """Returns what a function gave that is plain or async."""
    return await given if inspect.isawaitable(given) else given


async def called(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Returns the result of a function, async or plain; a plain one has a thread of its own."""
    if is_async(function):
        return await function(*given, **named)
    return await settled(await asyncio.to_thread(function, *given, **named))


async def until_one_ends(*work: Coroutine[Any, Any, None]) -> None:
    """Runs several things until one of them ends, and the others then no longer."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(tasks)


StreamPair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
COPY_BYTES = 64 * 1024


async def pass_both_ways(one: StreamPair, other: StreamPair) -> None:
    """Passes bytes to and fro until either side ends, and closes both."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(COPY_BYTES):
                writer.write(chunk)
                await writer.drain()

    try:
        await until_one_ends(copy(one[0], other[1]), copy(other[0], one[1]))
    finally:
        for _, writer in (one, other):
            writer.close()


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits ``work`` to its end, which has to have a deadline of its own, and only then raises a cancellation that came meanwhile.

    It is for what has to be let go of: `cancelled` asks again every `REPEAT_SECONDS`, and would otherwise end that, too.
    """
    task, interruption = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            interruption = error
    task.result()
    if interruption is not None:
        raise interruption


END_SECONDS = 1.0  # The seconds that a service has to end in order once a thread or task of it has died
LONGEST_WORDS = 4000  # Characters of an error's words that are reported
_ROOT = Path(__file__).parents[2]
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in ("services", "shared", "myxo"))
_PACKAGES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))
_SITES = {"site-packages", "dist-packages"}
# Where files lie that are Myxo's, packages' and Python's: a user who looks for the own mistake does not look there
_PYTHONS = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))

_Future = asyncio.Future[Any] | concurrent.futures.Future[Any]


class ThreadDied(MyxoError):
    """A thread that the service cannot do without has ended with an error; the text names both."""


class _Process:
    """The settings of this process: whether failures end it, what is called just before, and what is called on each of them."""

    armed = ending = False
    before_exit: Callable[[], None] | None = None
    listeners: list[Callable[[BaseException], object]] = []
    lock = threading.Lock()


_process = _Process()


def arm(before_exit: Callable[[], None] | None = None) -> None:
    """Makes every failure from now on end this process.

    Args:
        before_exit: called just before the process is ended by force.
    """
    _process.armed = True
    _process.before_exit = before_exit or _process.before_exit


def log_foreign_threads() -> None:
    """Logs errors in threads of libraries and custom functions from now on; they do not end the process."""
    threading.excepthook = _log_foreign


@contextlib.asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs coroutines beside the body; the first that fails makes the body fail with its error, and soon ends an armed process."""
    body = asyncio.current_task()
    assert body is not None
    failed: list[BaseException] = []
    ending = False

    def on_done(task: asyncio.Task[None]) -> None:
        if ending or failed:
            return
        what = f"task {task.get_name()}"
        error = MyxoError(f"{what} was cancelled from inside") if task.cancelled() else task.exception()
        if error is not None:
            failed.append(error)
            body.cancel()
            end_soon(error)
            log_error("died", what, error)

    tasks = [asyncio.create_task(coroutine, name=getattr(coroutine, "__qualname__", None)) for coroutine in work]
    for task in tasks:
        task.add_done_callback(on_done)
    try:
        yield
    except asyncio.CancelledError:
        if failed:
            raise failed[0] from None
        raise
    finally:
        ending = True
        await cancelled(tasks)


class SupervisedThread(threading.Thread):
    """A daemon thread whose failure ends its service."""

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            fatal(f"thread {self.name}", error)


def fatal(what: str, error: BaseException) -> None:
    """Logs that ``what`` has died of ``error``, asks the service to end, and ends it by force otherwise."""
    end_soon(error)
    log_error("died", what, error)
    died = ThreadDied(f"{what} died: {describe(error)}")
    for on_failure in list(_process.listeners):
        on_failure(died)


def end_soon(error: BaseException) -> None:
    """Has an armed process ended by force where it has not ended by itself in `END_SECONDS`. Its exit code: 2 for bad input and
    refused credentials, else 1."""
    with _process.lock:
        if not _process.armed or _process.ending:
            return
        _process.ending = True
    timer = threading.Timer(END_SECONDS, _end, (2 if isinstance(error, BadInput) or getattr(error, "refused", False) else 1,))
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def failures_reported(on_failure: Callable[[BaseException], object]) -> Iterator[None]:
    """Has ``on_failure`` called, on the thread that fails or notices, with each failure while the body runs."""
    _process.listeners.append(on_failure)
    try:
        yield
    finally:
        _process.listeners.remove(on_failure)


def log_failure(future: _Future, what: str) -> None:
    """Has the failure of the work behind ``future``, which is awaited nowhere, logged."""

    def on_done(done: _Future) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log_error("background_work_failed", what, error)

    future.add_done_callback(on_done)


def log_error(event: str, what: str, error: BaseException) -> None:
    """Logs one line at level error, with the traceback where the error is none of Myxo's own."""
    more = {"kind": type(error).__name__} if isinstance(error, MyxoError) else {"exc_info": error}
    structlog.get_logger().error(event, what=what, error=describe(error), **more)


def describe(error: BaseException) -> str:
    """Returns the error in words, with its kind where it is none of Myxo's own."""
    return str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}"


SAME_LINES, SAME_SECONDS = 20, 60.0  # Lines and tracebacks of one kind that a process logs within so many seconds; more are left out
_same = Counter[tuple[int, str]]()


def count_same(text: str) -> int:
    """Returns how many texts of this kind have come within the present `SAME_SECONDS`, this one included."""
    kind = int(time.monotonic() // SAME_SECONDS), failure_summary.kind(text)
    if next(iter(_same), kind)[0] != kind[0]:
        _same.clear()
    _same[kind] += 1
    return _same[kind]


def print_traceback() -> None:
    """Prints the traceback of the error that is handled, unless `SAME_LINES` of its kind were."""
    if count_same(text := traceback.format_exc()) <= SAME_LINES:
        print(text, file=sys.stderr, end="", flush=True)


def error_words(error: BaseException) -> str:
    """Returns kind and words of an error, on one line; its own ``__str__`` may fail, or give megabytes."""
    try:
        said = " ".join(str(error).split())[:LONGEST_WORDS]
    except Exception:
        said = "its text cannot be had"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def error_text(error: BaseException, function: object = None) -> str:
    """Returns what code of the user's raised, on one line: file and line of the last of its own frames, kind, and words.

    Where there are no words the line of code stands for them.

    Args:
        function: that was called; where none of the frames is the user's, it is said where that is defined.
    """
    error, stack = _first(error)
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):  # of a file that is imported
        return f"{_path(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in stack if not frame.filename.startswith(("<", *_OURS))]
    # where the function may be of one; of a user's or the system's packages, too
    packages = [one for one in frames if one.filename.startswith(_PACKAGES) or _SITES & {*Path(one.filename).parts}]
    own = [frame for frame in frames if frame not in packages and not frame.filename.startswith(_PYTHONS)] or packages[:1]
    words = error_words(error)
    if not own:
        return words + defined_at(function)
    line = "" if ": " in words else f": {own[-1].line}"
    return f"{_path(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name}: {words}{line}"


def _first(error: BaseException) -> tuple[BaseException, traceback.StackSummary]:
    """Returns an error, of a group its first one, and where it was raised; one that never was: where its group was."""
    stack = traceback.extract_tb(error.__traceback__)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        stack = traceback.extract_tb(error.__traceback__) or stack
    return error, stack


def is_async(function: object) -> bool:
    """Says whether a function of the user's, or what an object of theirs does where it is called, is async."""
    found: Any = function.func if isinstance(function, functools.partial) else function
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None))  # noqa: B004


def defined_at(function: object) -> str:
    """Returns file and line of a function of the user's, in brackets behind a space; nothing where Python does not know them."""
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function):
        return ""
    found = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
    code = getattr(found, "__code__", None) or getattr(type(found).__call__, "__code__", None)
    return f" ({_path(code.co_filename)}:{code.co_firstlineno}, {code.co_name})" if code is not None else ""


def _path(path: str) -> str:
    """Returns a path as short as it is where the process was started."""
    return path.removeprefix(os.getcwd() + os.sep)


def _log_foreign(args: Any) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        log_error("thread_failed", f"thread {args.thread.name if args.thread else '?'}", args.exc_value)


def _end(code: int) -> None:
    try:
        structlog.get_logger().warning("ended_by_force", reason="a thread or task of it had died", seconds=END_SECONDS)
        if _process.before_exit is not None:
            _process.before_exit()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


LOOK_INTERVAL_S = 0.5  # The interval at which is seen whether engines sleep; a sleep is counted to about so much


@asynccontextmanager
async def awake_timeout(seconds: float, asleep: Callable[[], bool] | None) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, of so many seconds in which nothing sleeps. ``asleep``: whether engines do; None: they never do."""
    async with asyncio.timeout(seconds) as limit:
        keeping = None if asleep is None else asyncio.create_task(_stand_still(limit, asleep))
        try:
            yield limit
        finally:
            if keeping is not None:
                keeping.cancel()


async def _stand_still(limit: asyncio.Timeout, asleep: Callable[[], bool]) -> None:
    """Puts a deadline off by the time asleep, until it is cancelled."""
    before = asyncio.get_running_loop().time()
    while True:
        slept = asleep()  # at the interval's begin: the deadline must not pass within it
        if slept:
            put_off(limit, LOOK_INTERVAL_S)
        await asyncio.sleep(LOOK_INTERVAL_S)
        now = asyncio.get_running_loop().time()
        if slept:
            put_off(limit, now - before - LOOK_INTERVAL_S)
        before = now


def put_off(limit: asyncio.Timeout, seconds: float) -> None:
    """Puts a deadline off that has not passed yet."""
    when = limit.when()
    if when is not None and not limit.expired():
        limit.reschedule(when + seconds)


def run_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Runs ``work`` on a daemon thread. Its waiter may leave it: an executor's thread that hangs would hold up the process's end."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return  # the waiter is gone
        try:
            future.set_result(work())
        except BaseException as error:  # whoever waits raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
