"""Worker processes that answer within a deadline or are killed and replaced.

A process has at most one call that blocks its event loop, and besides any number of calls that only wait (``waits``). If a process with
several calls dies, each of them is made once more, alone in a process, so that no call fails because of another.
"""

import asyncio
import math
from typing import Any

from services.reward.worker_process import START_SECONDS, Worker, WorkerBlocked, WorkerFailed, WorkerGone
from shared.runtime.child_process import ChildProcess
from shared.runtime.errors import BadMessage, DeadlineExceeded

__all__ = ["START_SECONDS", "VerifierPool", "WorkerFailed", "WorkerPool"]


class WorkerPool:
    """A pool of ``size`` processes, and at most as many retired ones that only finish their calls.

    Args:
        name: their name in errors. module: the module that they run, with ``arguments``. It speaks in `services.reward.frames`: a request
            is ``[id, request]`` and is answered with ``[id, None]`` when it is taken up and with ``[id, answer]``, a map, when it is done;
            the request None cancels the call of its id, which is answered at once.
        setup: the first request, answered when the process is ready: ``{"ready": True}`` or ``{"refused": [field, value, expected]}``.
    """

    def __init__(self, name: str, size: int, module: str, arguments: list[str], setup: object) -> None:
        self._name, self._size, self._command = name, size, ["-m", module, *arguments]
        self._setup = setup
        self._workers = [self._fresh() for _ in range(size)]
        self._leaving: set[Worker] = set()
        self._lock = asyncio.Lock()  # first come, first served: a call that needs a process of its own gets one
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Starts the workers, so that the first call does not wait for imports. Raises as `ask` does."""
        workers = list(self._workers)
        started = await asyncio.gather(*(worker.start() for worker in workers), return_exceptions=True)
        for failed in [error for error in started if error is not None]:
            await self.close()
            raise failed

    @property
    def ready(self) -> dict[str, Any]:
        """Returns the first worker's answer when it was ready."""
        return self._workers[0].ready

    @property
    def processes(self) -> list[ChildProcess]:
        """Returns the running processes."""
        found = [worker.process for worker in (*self._workers, *self._leaving) if worker.process is not None]
        return [process for process in found if process.running()]

    async def ask(self, request: object, awaited: str, awaited_from: str, deadline: float, *, waits: bool = False) -> dict[str, object]:
        """Returns the answer of a worker, without an error in it.

        Args:
            awaited, awaited_from: for the error at the deadline. deadline: seconds from when a worker takes the request up. waits: the call
                gives way to others while it waits (it is async): a worker may have many such in hand.

        Raises DeadlineExceeded (the call is cancelled, or its worker killed and replaced), WorkerFailed, BadMessage for a request that is
        too long, or ConfigError where a fresh worker refuses the run.
        """
        try:
            answer = await self._once(request, deadline, waits, exclusive=False)
            if answer is None:
                answer = await self._once(request, deadline, waits, exclusive=True)
        except TimeoutError as late:
            raise DeadlineExceeded(awaited, awaited_from, deadline, f"{late}, the group is given up") from None
        if answer is None:  # alone in its process a call has an answer or an error of its own, unless the pool was closed
            raise WorkerFailed(f"{self._name}'s process was ended")
        if "error" in answer:
            raise WorkerFailed(str(answer["error"]))
        return answer

    async def close(self) -> None:
        """Kills every worker."""
        await asyncio.gather(*(worker.kill() for worker in (*self._workers, *self._leaving)))

    async def _once(self, request: object, deadline: float, waits: bool, exclusive: bool) -> dict[str, object] | None:
        """Returns an answer, None where its process ended with several calls in hand. Raises TimeoutError that says what was done."""
        worker = await self._place(waits, exclusive)
        ended = True
        try:
            await worker.start()
            answer = await worker.ask(request, deadline, waits=waits)
            ended = False
            return answer
        except BadMessage:  # the request was not sent
            ended = False
            raise
        except TimeoutError:
            raise TimeoutError("its call was cancelled") from None
        except WorkerBlocked:
            alone = worker.calls == 1 and not worker.retired
            await worker.kill()
            if alone:
                raise TimeoutError("its process was killed") from None
            return None
        except WorkerGone as error:
            if error.alone:
                raise WorkerFailed(str(error)) from None
            return None
        finally:
            worker.retired |= ended  # threads and children that a late call has left behind end with its process
            worker.calls -= 1
            worker.blocking, worker.exclusive = worker.blocking and waits, False
            await self._tidy()

    async def _place(self, waits: bool, exclusive: bool) -> Worker:
        """Returns the worker with the fewest calls that may take one more."""
        async with self._lock:
            while True:
                await self._tidy()
                self._changed.clear()
                if found := [worker for worker in self._workers if self._may_take(worker, waits, exclusive)]:
                    break
                await self._changed.wait()
            worker = min(found, key=lambda worker: (worker.calls, worker.process is None))
            worker.calls += 1
            worker.blocking, worker.exclusive = worker.blocking or not waits, exclusive
            return worker

    def _may_take(self, worker: Worker, waits: bool, exclusive: bool) -> bool:
        if worker.retired or worker.exclusive or (worker.process is None and len(self._leaving) >= self._size):
            return False
        return not worker.calls if exclusive else waits or not worker.blocking

    async def _tidy(self) -> None:
        """Replaces the retired workers, and kills those of them that have no more calls."""
        for index, worker in enumerate(self._workers):
            if worker.retired:
                self._workers[index] = self._fresh()
                self._leaving.add(worker)
        for worker in [worker for worker in self._leaving if not worker.calls]:
            await worker.kill()
            self._leaving.discard(worker)
        self._changed.set()

    def _fresh(self) -> Worker:
        return Worker(self._name, self._command, self._setup)


class VerifierPool(WorkerPool):
    """Runs one verifier.

    Args:
        name: the verifier, a key of `services.reward.verifiers.VERIFIERS`.
    """

    def __init__(self, name: str, size: int, module: str = "services.reward.worker") -> None:
        super().__init__(f"verifier {name}", size, module, [name], {})

    async def score(self, responses: list[str], label: str, deadline: float) -> list[float]:
        """Returns one finite reward a response. Raises DeadlineExceeded (the worker is killed and replaced) or WorkerFailed."""
        request = {"responses": responses, "label": label}
        rewards = (await self.ask(request, f"{len(responses)} rewards", self._name, deadline)).get("rewards")
        if not isinstance(rewards, list) or len(rewards) != len(responses):
            raise WorkerFailed(f"{self._name} gave {rewards!r} for {len(responses)} responses")
        for reward in rewards:
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise WorkerFailed(f"{self._name} gave reward {reward!r}; expected a finite number")
        return [float(reward) for reward in rewards]
