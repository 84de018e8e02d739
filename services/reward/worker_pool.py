"""Worker processes that score groups within a deadline or are killed and replaced.

A process has at most one call that blocks its event loop, and besides any number of calls that only wait (``waits``). If a process with
several calls dies, each of them is made once more, alone in a process, so that no call fails because of another.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.reward.custom_functions import SCORE, FilterResult
from services.reward.worker_process import LOOP_SECONDS, Worker, WorkerBlocked, WorkerDied, WorkerFailed, WorkerGone, worker_environment
from shared.config.run_config import RunConfig
from shared.environment.protocol import first_problem
from shared.hooks import paths
from shared.rewards.names import wrong
from shared.rewards.reference import Reference
from shared.runtime.child_process import ChildProcess
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.schema import sample
from shared.schema.sample import Sample, Score


class CallLate(DeadlineExceeded):
    """A call was not answered in time; it was cancelled, or its process was killed."""


_MODULE = "services.reward.worker"

_ANSWER = TypeAdapter(FilterResult)


class WorkerPool:
    """A pool of ``size`` processes, and at most as many retired ones that only finish their calls.

    Args:
        name: their name in errors. module: the module that they run. It speaks in `services.reward.frames`: a request is ``[id, request]``
            and is answered with ``[id, None]`` when it is taken up and with ``[id, answer]``, a map, when it is done; the request None
            cancels the call of its id, which is answered at once.
        setup: the first request, answered when the process is ready, as `services.reward.worker` says.
        variables: of the service's environment that they get besides the usual ones. Raises ConfigError for one that is not set.
    """

    def __init__(self, name: str, size: int, setup: object, module: str = _MODULE, variables: Sequence[str] = ()) -> None:
        self._name, self._size, self._setup, self._module = name, size, setup, module
        self._environment = worker_environment(variables)
        self._workers = [self._fresh() for _ in range(size)]
        self._leaving: set[Worker] = set()
        self._lock = asyncio.Lock()  # first come, first served: a call that needs a process of its own gets one
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
        found = [worker.process for worker in (*self._workers, *self._leaving) if worker.process is not None]
        return [process for process in found if process.running()]

    async def ask(self, request: dict[str, Any], count: int, awaited: str, awaited_from: str, deadline: float) -> FilterResult:
        """Returns a worker's answer about a group of ``count`` samples, checked: a model's or a user's code may share the worker's process.

        Args:
            request: where its ``verb`` is one of those that wait, the call gives way to others: a worker may have many such in hand.
            awaited, awaited_from: for the error at the deadline. deadline: seconds from when a worker takes the request up.

        Raises CallLate (the call is cancelled, or its worker killed and replaced), WorkerDied, WorkerFailed, BadMessage for a request that
        is too long, DeadlineExceeded where a fresh worker does not start, or ConfigError where it refuses the run.
        """
        waits = request.get("verb") in self._waits
        try:
            answer = await self._once(request, deadline, waits, exclusive=False)
            if answer is None:
                answer = await self._once(request, deadline, waits, exclusive=True)
        except TimeoutError as late:
            raise CallLate(awaited, awaited_from, deadline, f"{late}, the group is given up") from None
        if answer is None:  # alone in its process a call has an answer or an error of its own, unless the pool was closed
            raise WorkerFailed(f"{self._name}'s process was ended")
        if "error" in answer:
            raise WorkerFailed(str(answer["error"]))
        try:
            result = _ANSWER.validate_python(answer)
        except ValidationError as error:
            raise WorkerFailed(f"{self._name} answered with what is no score: {first_problem(error)}") from None
        if len(result.scores) != count:
            raise WorkerFailed(f"{self._name} gave {len(result.scores)} scores for {count} samples")
        return result

    async def close(self) -> None:
        """Kills every worker."""
        await asyncio.gather(*(worker.kill() for worker in (*self._workers, *self._leaving)))

    async def _once(self, request: object, deadline: float, waits: bool, exclusive: bool) -> dict[str, Any] | None:
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
                raise WorkerDied(str(error)) from None
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
        return Worker(self._name, ["-m", self._module], self._setup, self._environment)


@dataclass(frozen=True)
class Verification:
    """What is asked of a verifier.

    name: the verifier. responses: their texts. references: what each is compared with, or one for all. pattern: takes the answer out of a
    response. key: the reward that counts of several.
    """

    name: str
    responses: Sequence[str]
    references: Sequence[Reference]
    pattern: str | None = None
    key: str | None = None

    def request(self, seconds: float) -> dict[str, Any]:
        """Returns the request to a worker, which `services.reward.worker.VerifierCalls.answer` reads."""
        return {**asdict(self), "verifier": self.name, "seconds": seconds}

    def each(self) -> list["Verification"]:
        """Returns a verification for each response alone."""
        references = [self.references[index % len(self.references)] for index in range(len(self.responses))]
        return [replace(self, responses=[one], references=[reference]) for one, reference in zip(self.responses, references, strict=True)]


class VerifierPool(WorkerPool):
    """Runs the verifiers of one queue.

    Args:
        queue: its name. names: the verifiers, keys of `services.reward.verifiers.VERIFIERS`.
    """

    def __init__(self, queue: str, names: Sequence[str], size: int, module: str = _MODULE) -> None:
        super().__init__(queue, size, {"verifiers": list(names)}, module)

    async def score(self, asked: Verification, deadline: float) -> list[Score]:
        """Returns one score a response; those that could not be verified have that of a wrong answer, and say why in ``unread``.

        The worker gives each response its share of ``deadline`` seconds. Where one holds up or ends the whole process, fresh ones get each
        alone, within as long again. Raises as `ask` does, but for the errors that a response is the cause of.
        """
        count = len(asked.responses)
        try:
            source = f"verifier {asked.name}"
            return (await self.ask(asked.request(deadline), count, "the rewards", source, deadline + LOOP_SECONDS)).scores
        except (CallLate, WorkerDied) as error:
            if count == 1:
                return [Score(reward=wrong(asked.name), unread=str(error))]
        return [score for alone in asked.each() for score in await self.score(alone, deadline / count)]


class HooksPool(WorkerPool):
    """Runs the user's own functions: ``reward_workers`` processes, each with all of them. Calls raise as `ask` does."""

    def __init__(self, config: RunConfig) -> None:
        self._config, found = config, paths(config, "reward")
        self._called = {
            "score": f"{SCORE} = {found.get(SCORE)}",
            "select": ", ".join(f"{field} = {path}" for field, path in found.items() if field != SCORE),
        }
        name = f"the functions {', '.join(found.values())}"
        setup, variables = {"config": config.model_dump_json()}, config.reward.worker_environment
        super().__init__(name, config.reward.reward_workers, setup, variables=variables)

    @property
    def scores_at_once(self) -> int | None:
        """Returns how many groups an async ``custom_rm_path`` may have in hand; None where it is plain, or before the start."""
        return self._config.reward.environment_concurrency if "score" in self._waits else None

    async def score(self, samples: list[Sample]) -> list[Score]:
        """Returns one score a sample, by ``custom_rm_path``."""
        return (await self._call("score", samples, f"{len(samples)} rewards")).scores

    async def select(self, samples: list[Sample], scores: list[Score]) -> FilterResult:
        """Returns the outcome of the filters for a scored group."""
        return await self._call("select", samples, "a verdict", scores=[asdict(score) for score in scores])

    async def _call(self, verb: str, samples: list[Sample], awaited: str, **more: object) -> FilterResult:
        request = {"verb": verb, "samples": sample.encode(samples, self._config.store.blob_bytes), **more}
        return await self.ask(request, len(samples), awaited, self._called[verb], self._config.reward.reward_timeout)
