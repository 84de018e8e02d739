"""Has the user's own function evaluate a version: the eval function, or a rollout function with ``evaluation=True``.

The buffer asks for it once a version. One replica takes that task from the queue, calls the function in a process of its own and reports
the result of each set; a replica that dies leaves it to another. Invariant: the task leaves the queue only once every set of the run has a
result, or a reason, or no one waits for it any more.
"""

import asyncio
from typing import Any

from pydantic import ValidationError

from services.rollout.in_flight import Stopped
from services.rollout.replica import Replica
from services.rollout.request_slots import evaluates
from shared.bus.streams import task_consumer
from shared.bus.subjects import EVAL
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.hooks.loading import eval_function, last_rollout
from shared.process.worker_pool import WorkerFailed, WorkerPool
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.tasks import cancelled
from shared.schema.ledger import eval_group_id
from shared.schema.messages import EvalResult, Evaluate, Evaluated
from shared.service.engine_load_balancer import EngineSpread
from shared.service.service_base import Service

MODULE = "services.rollout.function_worker"
POLL_INTERVAL_S = 0.05
VERSION_SECONDS = 30.0  # the time that a replica waits for the version before it hands the task back, for one that serves it
RETRY_SECONDS = 1.0  # the pause before a function that failed is called again, here or at another replica
SPARE_SECONDS = 60.0  # the time beyond the evaluation's deadline, which ends the call, that the processes' pool would leave it


class Evaluator:
    """The evaluation function of one replica."""

    def __init__(self, service: Service, replica: Replica) -> None:
        self._service, self._config, self._replica = service, service.config, replica
        named = eval_function(service.config)
        assert named is not None  # only made for runs that have one
        self._named = " = ".join(named)
        setup, variables = {"config": service.config.model_dump_json(), "verb": "evaluate"}, service.config.reward.worker_environment
        self._pool = WorkerPool("the evaluation function", 1, setup, MODULE, variables)
        self._spread = EngineSpread(service, replica, fleet=bool(evaluates(service.config)))
        self._queue = WorkQueue(service.bus, task_consumer(service.run, service.config.bus, EVAL), Evaluate)

    async def run(self) -> None:
        """Evaluates what it is asked for until cancelled. Raises ConfigError where the function cannot be imported."""
        following = asyncio.create_task(self._spread.keep())
        try:
            while True:
                if not self._replica.serving or self._replica.lags(EVAL) or self._service.held_back:
                    await asyncio.sleep(POLL_INTERVAL_S)
                    continue
                for lease in await self._queue.fetch(1):
                    await self._handle(lease)
        finally:
            await self._pool.close()
            await cancelled([following])

    async def _handle(self, lease: MessageLease[Evaluate]) -> None:
        task, log = lease.message, self._service.log.bind(version=lease.message.version)
        try:
            async with lease.held(), asyncio.timeout(max(0.0, task.deadline - self._service.bus.now())) as limit:
                await self._evaluate(lease)
        except asyncio.CancelledError:
            await lease.hand_back()
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            log.error("evaluation_late", error=f"{self._named} gave no result by the evaluation's deadline; its process was killed")
            await self._pool.close()
            await lease.ack()

    async def _evaluate(self, lease: MessageLease[Evaluate]) -> None:
        task = lease.message
        try:
            await self._replica.wait_serving(task.version, task.deadline - self._service.bus.now() if lease.exhausted else VERSION_SECONDS)
            life = self._replica.incarnation
            answer = await self._asked(task)
            await self._spread.look()
            if self._replica.incarnation != life:
                raise WorkerFailed("the replica's weights became untrusted meanwhile")
        except (DeadlineExceeded, Stopped) as error:  # no such weights here, or the process does not start
            self._service.log.warning("evaluation_handed_back", version=task.version, error=str(error))
            self._replica.miss(EVAL, task.version)
            return await lease.hand_back(delay=RETRY_SECONDS)
        except WorkerFailed as error:
            return await self._failed(lease, str(error))
        await self._report(task, answer)
        await lease.ack()

    async def _asked(self, task: Evaluate) -> dict[str, Any]:
        """Returns the answer of the function's process. Raises WorkerFailed, DeadlineExceeded, ConfigError."""
        self._spread.least = task.version
        rollout_id = last_rollout(self._config, task.version)
        request = {"rollout_id": rollout_id, "engine": self._spread.address, "engines": self._spread.engines}
        self._service.log.info("evaluation_begun", version=task.version, rollout_id=rollout_id, function=self._named)
        left = task.deadline - self._service.bus.now() + SPARE_SECONDS
        return await self._pool.ask(request, f"the evaluation of version {task.version}", self._named, left)

    async def _failed(self, lease: MessageLease[Evaluate], reason: str) -> None:
        task, tries = lease.message, self._config.bus.max_deliver
        self._service.log.error("evaluation_failed", version=task.version, error=reason, tries=lease.deliveries, of=tries)
        await self._pool.close()
        if lease.deliveries < tries:
            return await lease.hand_back(delay=RETRY_SECONDS)
        await self._report(task, {"unfit": f"{reason}; it failed {lease.deliveries} times"})
        await lease.ack()

    async def _report(self, task: Evaluate, answer: dict[str, Any]) -> None:
        """Informs the buffer of each set: first those that the function has of its own, for with the run's last one the version is done."""
        named = [item.name for item in self._config.eval.named.values()]
        results = {result.dataset: result for result in self._results(task, answer)}
        why = str(answer.get("unfit") or f"it gave no set of this name; it gave {', '.join(results) or 'none'}")
        nothing = {"oldest": task.version, "newest": task.version, "prompts": 0, "failed": 0, "samples": 0, "mean_reward": 0.0}
        missing = {name: EvalResult(dataset=name, reason=f"{self._named}: {why}", **nothing) for name in named if name not in results}
        for name, result in sorted({**results, **missing}.items(), key=lambda item: item[0] in named):
            group = eval_group_id(name, task.version, 0)
            await self._service.report(Evaluated(group=group, attempt=0, result=result, by=self._service.instance))

    def _results(self, task: Evaluate, answer: dict[str, Any]) -> list[EvalResult]:
        """Returns the results as the process gives them; versions that nothing named are all that were served meanwhile."""
        served, given = {"oldest": task.version, "newest": max(task.version, self._spread.versions()[1])}, answer.get("results", [])
        try:
            return [EvalResult(**{**fields, **(served if fields["oldest"] is None else {})}) for fields in given]
        except (ValidationError, TypeError, KeyError) as error:  # the user's code shares the process
            answer["unfit"] = f"its process gave an answer that cannot be read ({type(error).__name__}: {error})"
            return []
