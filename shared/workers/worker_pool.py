"""Worker processes that answer calls within a deadline or are killed and replaced.

A process has at most one call that blocks its event loop, and besides any number of calls that only wait (``waits``). If a process with
several calls dies, those that were not the cause are made once more, each alone in a process where nobody knows the cause; so no call fails
because of another. Nor does one fail because somebody else has killed or stopped its process: it is made once more, alone. Processes for
one call alone are there besides the pool's, so that no other call waits for them.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from shared.runtime.child_process import ChildProcess
from shared.runtime.errors import TASK, BadMessage, DeadlineExceeded
from shared.workers.worker_process import Asleep, Worker, WorkerBlocked, WorkerDied, WorkerFailed, WorkerGone, worker_environment


class CallLate(DeadlineExceeded):
    """A call was not answered in time; it was cancelled, or its process was killed."""

    fault = TASK


class CallBlocked(WorkerFailed):
    """A call held up its process for too long and was interrupted."""


class WorkerPool:
    """A pool of ``size`` processes, at most as many retired ones that only finish their calls, and as many for one call each.

    Args:
        name: their name in errors. module: the module that they run, which calls `shared.workers.call_server.serve_calls`.
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

    async def start(self) -> None:
        """Starts the workers, so that the first call does not wait for imports. Raises as `ask` does."""
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
                that raises WorkerGone, whose ``cause`` is None where nobody knows which call it was.

        Raises CallLate (the call is cancelled, or its worker killed and replaced), WorkerDied, WorkerFailed, BadMessage for a request that
        is too long, DeadlineExceeded where a fresh worker does not start, or ConfigError where it refuses the run.
        """
        waits = request.get("verb") in self._waits
        try:
            answer = await self._answered(request, deadline, waits, alone, once)
        except TimeoutError as late:
            raise CallLate(awaited, awaited_from, deadline, f"{late}, the group is given up") from None
        if "error" in answer:
            raise (CallBlocked if answer.get("blocked") else WorkerFailed)(str(answer["error"]))
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
                if found := [worker for worker in self._workers if self._may_take(worker, waits)]:
                    break
                await self._changed.wait()
            worker = min(found, key=lambda worker: (worker.calls, worker.process is None))
            worker.calls += 1
            worker.blocking |= not waits
            return worker

    def _may_take(self, worker: Worker, waits: bool) -> bool:
        if worker.retired or (worker.process is None and len(self._leaving) > self._size):
            return False
        return waits or not worker.blocking

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
