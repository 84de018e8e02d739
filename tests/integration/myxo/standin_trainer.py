"""A trainer without a model: it asks for batches, reads their payloads, reports steps, and keeps its step count in a checkpoint file.

For tests of the launcher, beside `standin_rollout`. It speaks to the buffer as the real trainer does. While the run's directory holds a
file ``pause`` with a number, no step from that number on is trained, so that a test has the time it needs.
"""

import asyncio
import time
from pathlib import Path

from shared.schema import sample
from shared.schema.messages import Accepted, Batch, BatchAnswer, BatchRequest, Durable, RunDone, Trained
from shared.schema.versions import version_after
from shared.schema.weight_messages import WeightsLive
from shared.service.service_base import Service, run
from tests.support.attesting import attested
from tests.support.real_declarations import declare_as

declare_as("trainer/batch_metrics.py")

STEP_SECONDS = 0.05


class Trainer:
    def __init__(self, service: Service) -> None:
        self._service, self._rollout = service, service.config.rollout
        self._checkpoint = Path(service.config.run.root) / "checkpoints" / "steps"

    async def work(self) -> None:
        service, total = self._service, self._rollout.num_rollout
        steps = int(self._checkpoint.read_text()) if self._checkpoint.is_file() else 0
        service.state = "ready"
        await self._publish(steps)
        if steps:
            await self._durable(steps)
        while not service.stopping.is_set():
            if self._paused(steps):
                await service.pause(0.05)
                continue
            answer = await self._ask(service.subjects.batch, BatchRequest(step=steps, version=self._version(steps)), BatchAnswer)
            if isinstance(answer, RunDone):
                return
            if not isinstance(answer, Batch):
                continue
            await self._train(answer)
            steps += 1
            await self._publish(steps)
            if steps % service.config.trainer.save_interval == 0 or steps == total:
                self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
                partial = self._checkpoint.with_suffix(".partial")
                partial.write_text(str(steps))
                partial.replace(self._checkpoint)
                await self._durable(steps)

    def _paused(self, steps: int) -> bool:
        try:
            return steps >= int((Path(self._service.config.run.root) / "pause").read_text())
        except FileNotFoundError:
            return False

    async def _train(self, batch: Batch) -> None:
        service, started = self._service, time.time()
        read = {group.group: sample.decode(await service.store.read(group.payload)) for group in batch.groups}
        samples = [one for group in batch.groups for one in read[group.group]]
        await asyncio.sleep(STEP_SECONDS)
        ended = time.time()
        rewards = [reward for group in batch.groups for reward in group.rewards]
        ages = [batch.version - int(one.versions().min()) for one in samples]
        report = Trained(step=batch.step, version=batch.version, started=started, ended=ended, attestation=attested(batch, read))
        await self._ask(service.subjects.trained, report, Accepted)
        metrics = {"agreement_abs_diff": 0.5, "agreement_tokens": 100.0}
        await service.event(
            "trainer", "step", Trained(step=batch.step, version=batch.version, started=started, ended=ended, metrics=metrics)
        )
        service.metrics.set("step", batch.step + 1)
        service.metrics.set("reward", sum(rewards) / len(rewards))
        service.metrics.set("loss", 0.0)
        service.metrics.set("staleness_mean", sum(ages) / len(ages))
        service.metrics.set("staleness_max", max(ages))
        service.metrics.set("train_tokens_per_s", sum(len(one.response) for one in samples) / (ended - started))
        await service.announce()

    async def _publish(self, steps: int) -> None:
        service, version = self._service, self._version(steps)
        live = WeightsLive(version=version, replicas=["rollout-0"], seconds=0.0, bytes=0, at=time.time())
        known = await service.bus.get(service.subjects.weights_bucket, "live", deadline=120)
        if known is None or WeightsLive.decode(known).version < version:
            await service.bus.put(service.subjects.weights_bucket, "live", live.encode(), deadline=120)
            await service.event("weights", "live", live)

    async def _durable(self, steps: int) -> None:
        await self._ask(self._service.subjects.durable, Durable(steps=steps), Accepted)

    async def _ask(self, subject, request, reply):
        return await self._service.bus.request(subject, request, reply, deadline=120, awaited_from="the buffer")

    def _version(self, steps: int) -> int:
        return version_after(steps, self._service.config.weights.update_weights_interval, self._rollout.num_rollout)


async def serve(service: Service) -> None:
    await Trainer(service).work()


if __name__ == "__main__":
    run("trainer", serve)
