"""The rollout service at work on a real engine, without a trainer: tasks in, groups out."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from services.rollout.engine.engine_client import EngineClient
from services.rollout.rollout_service import Rollout
from shared.bus.streams import generated_consumer, scored_consumer
from shared.bus.subjects import EVAL, TRAIN
from shared.bus.work_queue import WorkQueue
from shared.schema import sample
from shared.schema.messages import Evaluate, Failed, Generated, Message, Outcome, Sampling, Task
from shared.schema.sample import Sample
from shared.service.service_base import Service
from tests.integration.engine.load import load, prompts
from tests.support.waiting import until

PROMPT = prompts(1)[0]

Reply = TypeVar("Reply", bound=Message)


class Bench:
    """A rollout service that serves version 0, and hands to give it tasks and take what comes."""

    def __init__(self, service: Service, rollout: Rollout, client: EngineClient) -> None:
        self.service, self.rollout, self.client, self.replica = service, rollout, client, rollout.replica
        run, bus = service.run, service.config.bus
        self._generated = WorkQueue(service.bus, generated_consumer(run, bus, "math"), Generated)
        self._scored = WorkQueue(service.bus, scored_consumer(run, bus), Outcome)
        self.producing = asyncio.create_task(rollout.produce())
        self.working = [self.producing, asyncio.create_task(rollout.evaluate())]
        self.working.append(asyncio.create_task(rollout.stop_stale()))

    async def task(self, group: str = "g00000007", n: int = 2, **changes: Any) -> None:
        asked = {"prompt": "40+2=", "label": "42", "metadata": {"level": 3}, "sampling": Sampling(temperature=1.0, max_new_tokens=20)}
        task = Task(group=group, n=n, prompt_tokens=PROMPT, environment="math", **{**asked, "min_version": 0, **changes})
        await self.service.bus.publish(self.service.subjects.task(EVAL if group.startswith("eval.") else TRAIN), task)

    async def evaluation(self, version: int = 0, seconds: float = 240.0) -> None:
        """Asks for the evaluation of a version, which the run's own function makes, within so many seconds."""
        asked = Evaluate(version=version, deadline=time.time() + seconds)
        await self.service.bus.publish(self.service.subjects.task(EVAL), asked)

    async def in_decode(self, group: str, n: int, **changes: Any) -> bool:
        """Sends a task. Returns once its samples have some tokens; False: they were all over before that was seen."""
        tokens = self.rollout.tokens

        async def seen() -> str | None:
            if self.rollout.tokens > tokens:
                return "over"
            decoding = self.client.generating > 0 and (await load(self.client)).used_tokens > len(PROMPT) + 2 * n
            return "in decode" if decoding else None

        await self.task(group, n, **changes)
        return bool(await until(seen, "samples in decode", 240) == "in decode")

    async def generated(self) -> tuple[Generated, list[Sample]]:
        """The next group that was passed on to scoring, with its samples."""
        [lease] = await until(lambda: self._generated.fetch(1), "a generated group", 240)
        await lease.ack()
        return lease.message, sample.decode(await self.service.store.read(lease.message.payload))

    async def outcome(self) -> Outcome:
        """What the service tells the buffer next."""
        [lease] = await until(lambda: self._scored.fetch(1), "an outcome", 240)
        await lease.ack()
        return lease.message

    async def failure(self) -> str:
        """The reason why the next group failed."""
        outcome = await self.outcome()
        assert isinstance(outcome, Failed)
        return outcome.reason

    async def serve(self, version: int) -> None:
        """As after a push."""
        await self.client.set_weight_version(version)
        await self.replica.serve(version)

    async def ask(self, verb: str, request: Message, reply: type[Reply] = Message) -> Reply:  # type: ignore[assignment]
        """The replica's answer to a request of the trainer's. Raises RequestRefused."""
        subject = self.service.subjects.replica_weights(self.service.instance, verb)
        return await self.service.bus.request(subject, request, reply, deadline=240, awaited_from="the replica", patient=False)


NewBench = Callable[..., Awaitable[Bench]]
