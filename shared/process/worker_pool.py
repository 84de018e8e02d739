"""Worker processes, the calls in progress in them, and pools that restart them; answers come in any order with the id of their call."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from asyncio.streams import FlowControlMixin
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from shared.config.environment_variables import ROUTERS_VARIABLE
from shared.process import call_server
from shared.process.child_process import STOPPED_STATE, ChildProcess, seen
from shared.runtime.errors import INFRASTRUCTURE, TASK, BadMessage, ConfigError, DeadlineExceeded, MyxoError
from shared.runtime.tasks import awake_timeout, cancelled

START_SECONDS = 120.0  # The deadline for a fresh process to load its libraries; a call's own deadline begins after that
LOOP_SECONDS = 3.0  # The time that a process may not respond after a call was late, before it counts as blocked and is killed
WATCH_INTERVAL_S = 1.0  # The interval at which a process's signs of life are read
ENDED = "process ended in the middle of a call"

Asleep = Callable[[], bool] | None  # Whether no deadline of a call runs now; None: all run always

# The multiple of the time for which a call may block its process after which the process is killed: nothing has interrupted the call
SILENT_SHARE = 1.5

EXIT_SECONDS = 1.0  # The time for the exit code of a process that has closed its output

# The exit codes of a process that was killed. One that crashes ends by another signal, after words of its own.
KILLS = (-signal.SIGKILL, -signal.SIGTERM)

ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TMPDIR",
    "TZ",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "MYXO_RUN",
    ROUTERS_VARIABLE,
)
"""The variables that every worker gets. The code in it, which may be a model's, needs no more to start; keys of the bus, the store, W&B,
the hub or a cloud are not its business. What a user's function needs besides is named in ``reward.worker_environment``."""


def worker_environment(named: Sequence[str] = (), given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns a worker's variables: those of `ENVIRONMENT` that are set, and the ``named`` ones. Raises ConfigError for one that is not."""
    for name in named:
        if name not in given:
            raise ConfigError("reward.worker_environment", name, "names of variables that are set where the service starts")
    return {name: given[name] for name in (*ENVIRONMENT, *named) if name in given}


class WorkerFailed(MyxoError):
    """A worker could not answer this; the text says why."""


class WorkerDied(WorkerFailed):
    """The process of a call ended while it had no other: the call is the cause."""


class WorkerBlocked(MyxoError):
    """A call was late and its process does not respond any more, so that it has to be killed."""


class WorkerGone(WorkerFailed):
    """The process of a call has ended. ``cause``: this call is why, None: not known. ``outside``: somebody else has killed it, as
    the kernel does without memory, or had stopped it."""

    def __init__(self, text: str, cause: bool | None, outside: bool = False) -> None:
        self.cause, self.outside = cause, outside
        super().__init__(text)


# The answers to one call: None when the process takes it up, then the answer; WorkerGone where the process ends before
_Answers = asyncio.Queue[dict[str, Any] | None | WorkerGone]


class Worker:
    """A process that is started with its first call.

    Args:
        name: the process's name in errors. command: arguments of Python. setup: the first request. environment: its variables.
        asleep: whether no deadline of a call runs now; None: all run always.

    Attributes:
        calls: the number of its calls, those that wait for its start included. blocking: one of them blocks its event loop.
        retired: it gets no more calls. tainted: nor should it, since it may hold what a late call has left behind.
        ready: its answer when it was ready.
    """

    def __init__(self, name: str, command: list[str], setup: object, environment: Mapping[str, str], asleep: Asleep = None) -> None:
        self._name, self._command, self._setup, self._environment, self._asleep = name, command, setup, environment, asleep
        self.calls, self.blocking, self.retired, self.tainted = 0, False, False, False
        self.process: ChildProcess | None = None
        self.ready: dict[str, Any] = {}
        self._running_call: Path | None = None
        self._requests: asyncio.StreamWriter | None = None
        self._starting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ended_by = ENDED
        self._outside = False
        self._call_ids = count(1)
        self._open: dict[int, _Answers] = {}

    async def start(self) -> None:
        """Returns once it is ready. Raises DeadlineExceeded, WorkerFailed, or ConfigError where it refuses the run."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def ask(self, request: object, deadline: float, *, waits: bool = False) -> dict[str, Any]:
        """Returns the answer to a request.

        Args:
            deadline: seconds from when the process takes the request up; what it has in hand before may take as long, each.
            waits: the call does not hold up the process's event loop, so that it can be cancelled.

        Raises TimeoutError, once the process has confirmed that the call is cancelled and continues with the others. Raises WorkerBlocked
        where it is late and does not confirm it (in a process that is watched another call may block it: TimeoutError all the same),
        WorkerGone where the process ended, and BadMessage for a request that is too long.
        Where the caller is cancelled, so is a call that waits.
        """
        call_id, answers = next(self._call_ids), _Answers()
        data = call_server.frame([call_id, request])
        self._open[call_id] = answers
        try:
            if self._reading is None or self._reading.done():
                raise WorkerGone(f"{self._name}'s process ended before it was asked", cause=False)
            await self._exchange(data, answers, call_id, deadline * len(self._open), "takes up no call")
            try:
                async with awake_timeout(deadline, self._asleep):
                    return await _next(answers) or {}
            except TimeoutError:
                if not waits:
                    raise WorkerBlocked(f"{self._name}'s process is held up") from None
                try:
                    await self._exchange(call_server.frame([call_id, None]), answers, call_id, LOOP_SECONDS, "is held up")
                except WorkerBlocked:
                    if self._watching is None:
                        raise
                raise
        except asyncio.CancelledError:
            if waits and self._requests is not None:
                self._requests.write(call_server.frame([call_id, None]))
            raise
        finally:
            del self._open[call_id]

    async def kill(self) -> None:
        """Kills the process and what it started, and waits for its end."""
        self.retired = True
        await cancelled([task for task in (self._starting, self._watching) if task is not None])
        if self.process is not None:
            await asyncio.to_thread(self.process.stop, 0)
        if self._requests is not None:
            self._requests.close()

    async def _start(self) -> None:
        scratch = Path(tempfile.mkdtemp(prefix="myxo-worker-"))
        self._running_call = scratch / "running-call"
        call_server.write_empty_note(self._running_call)
        environment = {**self._environment, call_server.NOTE_VARIABLE: str(self._running_call)}
        # under the watchdog: what a function starts is killed with it
        self.process = ChildProcess(self._name, [sys.executable, *self._command], None, environment, watchdog=True, scratch=scratch)
        answers, self._requests = await process_streams(self.process)
        self._reading = asyncio.create_task(self._read(answers))
        try:
            self.ready = await self.ask(self._setup, START_SECONDS)
        except WorkerBlocked:
            raise DeadlineExceeded("its first answer", self._name, START_SECONDS, "its process was killed") from None
        except WorkerFailed as error:
            words = "process ended before it was ready; its last words are in the service's log"
            raise WorkerFailed(f"{self._name}'s {words} ({error})") from error
        if isinstance(refused := self.ready.get("refused"), list):
            raise ConfigError(*refused)
        if (block_s := self.ready.get("block_s")) is not None:
            self._watching = asyncio.create_task(self._watch(self._running_call, SILENT_SHARE * float(block_s) + LOOP_SECONDS))

    async def _watch(self, note: Path, limit_s: float) -> None:
        """Kills the process once its loop has given no sign of life for ``limit_s``: a call in C holds the interpreter's lock, say."""
        began = time.monotonic()
        while self._reading is not None and not self._reading.done():
            await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                silent_s = min(call_server.silent_s(note), time.monotonic() - began)
            except OSError:  # it has ended
                return
            if silent_s > limit_s and self.process is not None:
                self.stopped()
                self._ended_by = f"process was killed: a call held it up for {silent_s:.0f} s, and nothing interrupts that"
                return self.process.kill()

    async def _exchange(self, data: bytes, answers: _Answers, call_id: int, deadline: float, problem: str) -> None:
        """Sends data and returns when the process responds to it. Raises WorkerBlocked, which says the problem, and WorkerGone."""
        assert self._requests is not None  # it was started
        try:
            async with asyncio.timeout(deadline):
                self._requests.write(data)
                await self._requests.drain()
                await _next(answers)
        except TimeoutError:
            raise WorkerBlocked(f"{self._name}'s process {problem}") from None
        except ConnectionError as error:
            raise self._gone(f"process broke off: {error}", call_id) from error

    async def _read(self, stream: asyncio.StreamReader) -> None:
        reason = ""
        try:
            while True:
                call_id, answer = _parsed(await call_server.read_frame(stream))
                if call_id in self._open:
                    self._open[call_id].put_nowait(answer)
        except EOFError:
            self._outside |= await self._was_killed()
        except BadMessage as error:
            reason = f"process answered {error}"
        except ConnectionError as error:
            reason = f"process broke off: {error}"
        finally:  # whatever ended it: no caller waits for answers that do not come
            if self._running_call is not None:
                self._ended_by += call_server.crash_words(self._running_call)
            open_calls = [(answers, self._gone(reason or self._ended_by, call_id)) for call_id, answers in self._open.items()]
            self.retired = True
            for answers, gone in open_calls:
                answers.put_nowait(gone)

    async def _was_killed(self) -> bool:
        """Returns whether somebody other than this service, or the process itself, has ended it."""
        assert self.process is not None and self._running_call is not None
        if self.retired or self._ended_by != ENDED or call_server.crash_words(self._running_call):
            return False
        end = time.monotonic() + EXIT_SECONDS
        while (code := self.process.exit_code()) is None and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return code in KILLS and not self.retired and self._ended_by == ENDED

    def stopped(self) -> bool:
        """Returns whether a signal has stopped one of its processes; its calls have ended from outside then."""
        members = self.process.members() if self.process is not None else []
        self._outside |= any(process.state == STOPPED_STATE for process in seen(members))
        return self._outside

    def _gone(self, reason: str, call_id: int) -> WorkerGone:
        """Returns the error of a call whose process has ended: it is the cause if it was executed then, or was the only one, and nobody
        else has killed the process."""
        if self._outside:
            return WorkerGone(f"{self._name}'s process was killed, or stopped by a signal, in the middle of a call", None, outside=True)
        executed = None if self._running_call is None else call_server.executed_call(self._running_call)
        cause = executed == call_id if executed else True if self.calls <= 1 and not self.retired else None
        return WorkerGone(f"{self._name}'s {reason}", cause)


async def _next(answers: _Answers) -> dict[str, Any] | None:
    """Returns what the process says next of a call. Raises WorkerGone."""
    if isinstance(answer := await answers.get(), WorkerGone):
        raise answer
    return answer


async def process_streams(process: ChildProcess) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns the two ends of a process's pipes: the reader of its answers, and the writer of its requests."""
    loop, answers = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), process.stdout)
    transport, protocol = await loop.connect_write_pipe(FlowControlMixin, process.stdin)
    return answers, asyncio.StreamWriter(transport, protocol, None, loop)


def _parsed(frame: object) -> tuple[int, dict[str, Any] | None]:
    """Returns a frame's call and its answer, None in place of the answer where the call is taken up. Raises BadMessage."""
    match frame:
        case [int(call_id), (None | dict()) as answer]:
            return call_id, answer
    raise BadMessage(f"{str(frame)[:80]!r}")


class CallLate(DeadlineExceeded):
    """A call was not answered in time; it was cancelled, or its process was killed."""

    fault = TASK


class CallBlocked(WorkerFailed):
    """A call held up its process for too long and was interrupted."""


class WorkerUnable(WorkerFailed):
    """A worker lacks what it needs of its machine to answer: the same call may do well another time."""

    fault = INFRASTRUCTURE


class WorkerPool:
    """A pool of ``size`` processes, at most as many retired ones that only finish their calls, and as many for one call each.

    Args:
        name: their name in errors. module: the module that they run, which calls `shared.process.call_server.serve_calls`.
        setup: the first request, answered when the process is ready.
        variables: of the service's environment that they get besides the usual ones. Raises ConfigError for one that is not set.
        asleep: whether no deadline of a call runs now; None: all run always.
    """

    def __init__(self, name: str, size: int, setup: object, module: str, variables: Sequence[str] = (), asleep: Asleep = None) -> None:
        self._name, self._size, self._setup, self._module, self._asleep = name, size, setup, module, asleep
        self._environment = worker_environment(variables)
        self._workers = [self._fresh() for _ in range(size)]
        self._leaving: set[Worker] = set()
        self._lone: set[Worker] = set()
        self._lone_places = asyncio.Semaphore(size)
        self._lock = asyncio.Lock()  # first come, first served
        self._changed = asyncio.Event()
        self._waits: list[str] = []
        self._started: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the workers, once, so that the first call does not wait for imports. Raises as `ask` does."""
        self._started = self._started or asyncio.create_task(self._start())
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        workers = list(self._workers)
        started = await asyncio.gather(*(worker.start() for worker in workers), return_exceptions=True)
        for failed in [error for error in started if error is not None]:
            await self.close()
            raise failed
        self._waits = workers[0].ready["waits"]

    @property
    def processes(self) -> list[ChildProcess]:
        """Returns the running processes."""
        found = [worker.process for worker in self._all() if worker.process is not None]
        return [process for process in found if process.running()]

    async def ask(
        self, request: dict[str, Any], awaited: str, awaited_from: str, deadline: float, *, alone: bool = False, once: bool = False
    ) -> dict[str, Any]:
        """Returns a worker's answer, which is not to be trusted: a model's or a user's code may share the worker's process.

        A caller that is cancelled has the call cancelled in the worker, too.

        Args:
            request: where its ``verb`` is one of those that wait, the call gives way to others: a worker may have many such in hand.
            awaited, awaited_from: for the error at the deadline. deadline: seconds from when a worker takes the request up.
            alone: in a process of its own, since it has cost others theirs. once: where another call ends its process it is not made again;
                that raises WorkerGone, whose ``cause`` is None where it is not known which call it was.

        Raises CallLate (the call is cancelled, or its worker killed and replaced), WorkerDied, WorkerFailed, BadMessage for a request that
        is too long, DeadlineExceeded where a fresh worker does not start, or ConfigError where it refuses the run.
        """
        waits = request.get("verb") in self._waits
        try:
            answer = await self._answered(request, deadline, waits, alone, once)
        except TimeoutError as late:
            raise CallLate(awaited, awaited_from, deadline, f"{late}, the group is given up") from None
        if "error" in answer:
            kind = CallBlocked if answer.get("blocked") else WorkerUnable if answer.get("unable") else WorkerFailed
            raise kind(str(answer["error"]))
        return answer

    async def close(self) -> None:
        """Kills every worker."""
        await asyncio.gather(*(worker.kill() for worker in self._all()))

    async def _answered(self, request: object, deadline: float, waits: bool, alone: bool, once: bool) -> dict[str, Any]:
        while True:
            try:
                return await (self._once_alone if alone else self._once)(request, deadline, waits)
            except WorkerGone as gone:
                if gone.cause or (alone and gone.outside):  # the latter: for the second time
                    raise WorkerDied(str(gone)) from None
                if once and not alone:
                    raise
                if alone and gone.cause is None:  # alone it has an answer or an error of its own, unless the pool was closed
                    raise WorkerFailed(f"{self._name}'s process was ended") from None
                alone |= gone.cause is None

    async def _once(self, request: object, deadline: float, waits: bool) -> dict[str, Any]:
        """Returns an answer. Raises TimeoutError that says what was done, and WorkerGone where another call ended the process."""
        worker = await self._place(waits)
        try:
            return await self._asked(worker, request, deadline, waits)
        finally:
            worker.calls -= 1
            worker.blocking &= waits
            await self._tidy()

    async def _once_alone(self, request: object, deadline: float, waits: bool) -> dict[str, Any]:
        """As `_once`, in a fresh process that ends with the call."""
        async with self._lone_places:
            worker = self._fresh()
            worker.calls = 1
            self._lone.add(worker)
            try:
                return await self._asked(worker, request, deadline, waits)
            finally:
                await worker.kill()
                self._lone.discard(worker)

    @staticmethod
    async def _asked(worker: Worker, request: object, deadline: float, waits: bool) -> dict[str, Any]:
        try:
            await worker.start()
            return await worker.ask(request, deadline, waits=waits)
        except BadMessage:  # the request was not sent
            raise
        except asyncio.CancelledError:
            worker.retired |= not waits  # a call that waits gives way
            raise
        except (TimeoutError, WorkerBlocked) as late:
            if worker.stopped():
                await worker.kill()
                raise WorkerGone("a signal has stopped its process", cause=None, outside=True) from None
            if isinstance(late, TimeoutError):
                worker.tainted = True
                raise TimeoutError("its call was cancelled") from None
            alone = worker.calls == 1 and not worker.retired
            await worker.kill()
            if alone:
                raise TimeoutError("its process was killed") from None
            raise WorkerGone(str(late), cause=None) from None
        except BaseException:
            worker.retired = True
            raise

    async def _place(self, waits: bool) -> Worker:
        """Returns the worker with the fewest calls that may take one more."""
        async with self._lock:
            while True:
                await self._tidy()
                self._changed.clear()
                full = len(self._leaving) > self._size
                fit = (worker for worker in self._workers if not worker.retired and not (worker.process is None and full))
                if found := [worker for worker in fit if waits or not worker.blocking]:
                    break
                await self._changed.wait()
            worker = min(found, key=lambda worker: (worker.calls, worker.process is None))
            worker.calls += 1
            worker.blocking |= not waits
            return worker

    async def _tidy(self) -> None:
        """Replaces the retired workers, and the tainted ones as long as others may start; kills those that have no more calls."""
        for index, worker in enumerate(self._workers):
            if worker.retired or (worker.tainted and len(self._leaving) < self._size):
                worker.retired = True
                self._workers[index] = self._fresh()
                self._leaving.add(worker)
        for worker in [worker for worker in self._leaving if not worker.calls]:
            await worker.kill()
            self._leaving.discard(worker)
        self._changed.set()

    def _all(self) -> list[Worker]:
        return [*self._workers, *self._leaving, *self._lone]

    def _fresh(self) -> Worker:
        return Worker(self._name, ["-m", self._module], self._setup, self._environment, self._asleep)
