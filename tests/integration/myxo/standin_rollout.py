"""A rollout service without an engine: it speaks to bus and store as the real one does, and makes its tokens up.

For tests of the launcher, which only sees processes, cards, ledger and events. The real engine takes half a minute to start.
The share of right answers grows with the weight version, so that a run has a reward curve to show. While the run's directory holds a
file ``refuse``, every group fails for the reason in it; while it holds a file ``die``, the service dies of it once it is at work.
"""

import asyncio
import random
import time
import uuid
from pathlib import Path

from shared.bus.streams import task_consumer
from shared.bus.subjects import EVAL, ROLLOUT, TRAIN
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.schema import sample
from shared.schema.digests import reference
from shared.schema.messages import Failed, Generated, Task
from shared.schema.sample import Sample
from shared.schema.weight_messages import WeightsLive
from shared.service.service_base import Service, run
from tests.support.real_declarations import declare_as
from tests.support.valid_messages import example

declare_as("rollout/rollout_service.py", "rollout/replica.py")

GENERATE_SECONDS = 0.02
RESPONSE_TOKENS = 8


class Rollout:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._dice = random.Random(service.config.data.rollout_seed)

    async def work(self) -> None:
        service = self._service
        service.state = "fenced"
        service.metrics.set("running_groups", 0)
        async with service.background(self._follow_versions(), self._take(EVAL), self._take(TRAIN), self._live()):
            await service.stopping.wait()

    async def _follow_versions(self) -> None:
        service = self._service
        while True:
            value = await service.bus.get(service.subjects.weights_bucket, "live", deadline=120)
            if value is not None and (version := WeightsLive.decode(value).version) != service.version:
                service.version, service.state = version, "ready"
                service.metrics.set("version", version)
                await service.announce()
            await asyncio.sleep(0.05)

    async def _take(self, task_class: str) -> None:
        service = self._service
        queue = WorkQueue(service.bus, task_consumer(service.run, service.config.bus, task_class), Task)
        while True:
            if service.state != "ready":
                await asyncio.sleep(0.05)
                continue
            for lease in await queue.fetch(4):
                await self._generate(lease)

    async def _generate(self, lease: MessageLease[Task]) -> None:
        task, service = lease.message, self._service
        while service.version < task.min_version:
            await asyncio.sleep(0.02)
        started = time.time()
        await asyncio.sleep(GENERATE_SECONDS)
        if (refusal := self._told("refuse")) is not None:
            failed = Failed(group=task.group, attempt=task.attempt, reason=f"{task.group}: {refusal}", by=service.instance)
            await service.bus.publish(service.subjects.scored(ROLLOUT), failed, msg_id=uuid.uuid4().hex, deadline=120)
            await lease.ack()
            return
        samples = [self._sample(task, index) for index in range(task.n)]
        blobs = self.written(task, sample.encode(samples, service.config.store.blob_bytes))
        generation, keys = uuid.uuid4().hex, service.subjects.payload_key
        written = {keys(task.group, task.attempt, part, generation): blob for part, blob in enumerate(blobs)}
        await service.store.write(written)
        made = {"payload": reference(service.run, written, [one.length for one in samples]), "samples": [one.meta() for one in samples]}
        of_task = {"group": task.group, "attempt": task.attempt, "environment": task.environment}
        message = Generated(**of_task, **made, replica=service.instance, started=started, ended=time.time())
        await service.bus.publish(
            service.subjects.generated(task.environment), self.sent(task, message), msg_id=f"{task.group}.{task.attempt}", deadline=120
        )
        await lease.ack()
        service.metrics.set("generated_tokens_per_s", RESPONSE_TOKENS * task.n / (time.time() - started))

    def written(self, task: Task, blobs: list[bytes]) -> list[bytes]:
        """What lies in the store of a group."""
        return blobs

    def sent(self, task: Task, message: Generated) -> Generated:
        """What is said of a group."""
        return message

    def _told(self, name: str) -> str | None:
        path = Path(self._service.config.run.root) / name
        return path.read_text() if path.is_file() else None

    async def _live(self) -> None:
        """Dies when told to, some time after it was ready."""
        while self._service.state != "ready" or (error := self._told("die")) is None:
            await asyncio.sleep(0.05)
        await self._service.announce()
        await asyncio.sleep(1.0)
        raise OSError(28, f"{error} ({time.time()})")

    def _sample(self, task: Task, index: int) -> Sample:
        right = self._dice.random() < min(0.9, 0.2 + 0.05 * self._service.version)
        text, segments = str(task.label) if right else "wrong", [(0, RESPONSE_TOKENS, self._service.version)]
        fields = {"prompt": task.prompt_tokens, "response": [*range(RESPONSE_TOKENS)], "log_probs": -1.0, "segments": segments}
        return example(Sample, group=task.group, index=index, text=text, label=task.label, **fields)


async def serve(service: Service) -> None:
    await Rollout(service).work()


if __name__ == "__main__":
    run("rollout", serve)
