"""The rest of a run, played over the real bus and store: what replicas, verifiers and a trainer say to the buffer."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis

from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.streams import task_consumer
from shared.bus.subjects import EVAL, REWARD, ROLLOUT, TRAIN, Subjects
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.config.run_config import RunConfig
from shared.schema import sample
from shared.schema.digests import reference
from shared.schema.ledger import LedgerRecord
from shared.schema.ledger_audit import AuditReport, audit
from shared.schema.messages import (
    Accepted,
    Batch,
    BatchAnswer,
    BatchPending,
    BatchRequest,
    Durable,
    Evaluated,
    Interrupted,
    Outcome,
    Scored,
    Task,
    Trained,
    Wanted,
)
from shared.schema.sample import Sample
from shared.schema.versions import is_pushed, version_after
from shared.schema.weight_messages import WeightsLive
from shared.store.payload_store import Store
from tests.support.attesting import attested
from tests.support.service_process import ServiceProcess
from tests.support.valid_messages import example
from tests.support.waiting import until


class Player:
    """Everybody but the buffer, in one run.

    Args:
        store_url: of the run's Valkey. logs: directory for the buffers' output.
    """

    def __init__(self, bus: Bus, store: Store, config: RunConfig, nats_url: str, logs: Path) -> None:
        self.bus, self.store, self.config, self.names = bus, store, config, Subjects(config.run.name)
        self._nats_url, self._logs = nats_url, logs
        self._queues = {kind: WorkQueue(bus, task_consumer(config.run.name, config.bus, kind), Task) for kind in (TRAIN, EVAL)}
        self.version = 0
        self.spoil: Callable[[str], Callable[[list[Sample]], list[bytes]] | None] = lambda _: None
        """What makes the blobs of a group's samples, by its id, in the place of the codec."""

    # --- the buffer's process

    def environment(self, instance: str) -> dict[str, str]:
        """Returns what a buffer of this run needs to know."""
        return {"NATS_URL": self._nats_url, "MYXO_RUN": self.config.run.name, "MYXO_INSTANCE": instance}

    def launch(self, instance: str = "buffer-1") -> ServiceProcess:
        return ServiceProcess("buffer", self._logs / f"{instance}.log", self.environment(instance))

    async def ready(self, buffer: ServiceProcess, instance: str = "buffer-1") -> None:
        """Waits until this very process says that it is ready."""
        await self.says(buffer, instance, "ready")

    async def says(self, buffer: ServiceProcess, instance: str, state: str) -> None:
        """Waits until this very process says that it is in ``state``."""
        registry = Registry(self.bus, self.config.run.name)

        async def says_so() -> bool:
            assert buffer.process.poll() is None, buffer.words()
            statuses = await registry.alive("buffer")
            return any((status.pid, status.instance, status.state) == (buffer.process.pid, instance, state) for status in statuses)

        await until(says_so, f"{instance} {state}")

    # --- replicas and verifiers

    async def tasks(self, most: int, kind: str = TRAIN) -> list[MessageLease[Task]]:
        """Takes tasks that are waiting; empty when there is none."""
        return await self._queues[kind].fetch(most, seconds=0.3)

    async def all_tasks(self, count: int, kind: str = TRAIN) -> list[MessageLease[Task]]:
        """Takes so many tasks, which may come one after the other."""
        leases: list[MessageLease[Task]] = []

        async def taken() -> bool:
            leases.extend(await self.tasks(count - len(leases), kind))
            return len(leases) == count

        await until(taken, f"{count} tasks")
        return leases

    async def waiting(self, kind: str = TRAIN) -> int:
        return sum(await self._queues[kind].depth())

    async def generate(self, task: Task, version: int | None = None) -> Scored:
        """Writes the samples of a task's group, all on one version, and returns what a reward service would say of them."""
        version = self.version if version is None else version
        fields = {"group": task.group, "prompt": task.prompt_tokens, "response": [0, 1, 2], "segments": [(0, 3, version)], "text": "2"}
        samples = [example(Sample, index=index, label=task.label, **fields) for index in range(task.n)]
        return await self.scored(task, samples, [float(index % 2) for index in range(task.n)])

    async def scored(self, task: Task, samples: list[Sample], rewards: list[float]) -> Scored:
        """Writes the samples of a task's group, and returns what a reward service would say of them."""
        metas, lengths = [one.meta(one.token_digest()) for one in samples], [one.length for one in samples]
        blobs = spoilt(samples) if (spoilt := self.spoil(task.group)) else sample.encode(samples, self.config.store.blob_bytes)
        generation = uuid.uuid4().hex
        written = {self.names.payload_key(task.group, task.attempt, part, generation): blob for part, blob in enumerate(blobs)}
        await self.store.write(written)
        fields = {"payload": reference(self.names.run, written, lengths), "samples": metas, "rewards": rewards, "replica": "replica-1"}
        times = {"started": time.time(), "ended": time.time()}
        return Scored(group=task.group, attempt=task.attempt, environment=task.environment, **fields, **times)

    async def say(self, outcome: Outcome) -> None:
        role = ROLLOUT if isinstance(outcome, Interrupted | Wanted | Evaluated) else REWARD
        await self.bus.publish(self.names.scored(role), outcome)

    async def work(self, most: int, kind: str = TRAIN, version: int | None = None) -> list[str]:
        """Generates and scores up to ``most`` groups; returns their ids."""
        done = []
        for lease in await self.tasks(most, kind):
            await self.say(await self.generate(lease.message, version))
            await lease.ack()
            done.append(lease.message.group)
        return done

    async def work_until(self, groups: int, kind: str = TRAIN, version: int | None = None) -> list[str]:
        """Works until so many groups are done."""
        done: list[str] = []

        async def enough() -> bool:
            done.extend(await self.work(groups - len(done), kind, version))
            return len(done) >= groups

        await until(enough, f"{groups} tasks")
        return done

    # --- the trainer

    async def live(self, version: int) -> None:
        """Announces a version as served."""
        self.version = version
        news = WeightsLive(version=version, replicas=["replica-1"], seconds=0.1, bytes=1, at=time.time())
        await self.bus.put(self.names.weights_bucket, "live", news.encode())
        await self.bus.publish(self.names.event("weights", "live"), news)

    async def ask(self, step: int) -> BatchAnswer:
        version = step // self.config.weights.update_weights_interval
        return await self.bus.request(
            self.names.batch, BatchRequest(step=step, version=version), BatchAnswer, deadline=60, awaited_from="the buffer"
        )

    async def batch(self, step: int, *, working: bool = False) -> Batch:
        """Waits for the batch of a step; ``working``: generates and scores whatever is waiting meanwhile."""

        async def formed() -> Batch | None:
            if working:
                await self.work(4)
            answer = await self.ask(step)
            assert isinstance(answer, Batch | BatchPending), answer
            return answer if isinstance(answer, Batch) else None

        batch = await until(formed, f"the batch of step {step}")
        assert isinstance(batch, Batch)
        return batch

    async def trained(self, step: int) -> None:
        """Reports a step, and pushes the weights if it is time."""
        interval, total = self.config.weights.update_weights_interval, self.config.rollout.num_rollout
        version = version_after(step + 1, interval, total)
        batch = await self.ask(step)
        assert isinstance(batch, Batch)
        samples = {group.group: sample.decode(await self.store.read(group.payload)) for group in batch.groups}
        now, attestation = time.time(), attested(batch, samples)
        report = Trained(step=step, version=version, started=now, ended=now, metrics={"loss": 0.1}, attestation=attestation)
        await self.bus.request(self.names.trained, report, Accepted, deadline=60, awaited_from="the buffer")
        if is_pushed(step + 1, interval, total) and version > self.version:
            await self.live(version)

    async def durable(self, steps: int) -> None:
        await self.bus.request(self.names.durable, Durable(steps=steps), Accepted, deadline=60, awaited_from="the buffer")

    # --- what became of it

    async def records(self) -> list[LedgerRecord]:
        return [record async for _, record in streams.read(self.bus, self.names.ledger_stream, LedgerRecord)]

    async def audit(self) -> AuditReport:
        return audit(await self.records(), self.config.rollout.max_staleness, self.config.rollout.rollout_batch_size)

    async def phase(self) -> str | None:
        return await runs.phase(self.bus, self.config.run.name)

    async def blobs(self) -> list[str]:
        """Payload keys of the run that the store still holds."""
        url = await runs.store_url(self.bus, self.config.run.name)
        async with Redis.from_url(url) as client:
            return sorted(key.decode() for key in await client.keys(f"{self.config.run.name}:*"))
