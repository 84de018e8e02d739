"""Rollout and reward in one process, without an engine: tasks in, payloads and rewards out.

It does what `services.rollout` and `services.reward` do with a group once its tokens are there: waits for the weights that the task asks
for, encodes, writes the payload, publishes `Scored`, and acks the task only when that is confirmed. Groups are taken in lots, as they
are where many finish at about the same time.
"""

import asyncio
import contextlib
import os
import sys
import time

from benchmarks.sample_path.content import SAMPLES, Pool, array_bytes
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.streams import task_consumer
from shared.bus.subjects import REWARD, TRAIN, Subjects
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.config.run_config import RunConfig
from shared.runtime.service_base import settle
from shared.schema import sample
from shared.schema.digests import reference
from shared.schema.messages import Message, Scored, Task
from shared.schema.weight_messages import WeightsLive
from shared.store.payload_store import Store

LOT_BYTES = 4 << 20
"""Of arrays, about: what is written together."""

LOTS = 2
"""In hand at a time: one is encoded while others are on their way."""


class Producer:
    """One replica and its verifier.

    Args:
        length: tokens of a sample.
    """

    def __init__(self, bus: Bus, store: Store, config: RunConfig, length: int) -> None:
        self._bus, self._store, self._config, self._names = bus, store, config, Subjects(config.run.name)
        self._queue = WorkQueue(bus, task_consumer(config.run.name, config.bus, TRAIN), Task)
        self._pool, self._lot = Pool(length), max(1, min(64, LOT_BYTES // (SAMPLES * array_bytes(length))))
        self._version = -1
        self._newer = asyncio.Condition()

    async def run(self) -> None:
        """Works until cancelled."""

        async def on_live(message: object) -> None:
            await self._serve(WeightsLive.decode(message.data).version)  # type: ignore[attr-defined]

        await self._bus.connection.subscribe(self._names.event("weights", "live"), cb=on_live)
        if known := await self._bus.get(self._names.weights_bucket, "live"):
            await self._serve(WeightsLive.decode(known).version)
        gate = asyncio.Semaphore(LOTS)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await gate.acquire()
                leases = await self._queue.fetch(self._lot)
                tasks.create_task(self._handle(leases)).add_done_callback(lambda _: gate.release())

    async def _serve(self, version: int) -> None:
        async with self._newer:
            self._version = max(self._version, version)
            self._newer.notify_all()

    async def _handle(self, leases: list[MessageLease[Task]]) -> None:
        blobs: dict[str, bytes] = {}
        outcomes: dict[str, Message] = {}
        for lease in leases:
            task = lease.message
            if task.min_version > self._version:
                async with self._newer:
                    await self._newer.wait_for(lambda least=task.min_version: least <= self._version)
            outcomes[f"{task.group}.{task.attempt}"] = self._generate(task, blobs)
        await self._store.write(blobs)
        await self._bus.publish_all(self._names.scored(REWARD), outcomes)
        for lease in leases:
            await lease.ack()

    def _generate(self, task: Task, blobs: dict[str, bytes]) -> Scored:
        started, text = time.time(), str(task.prompt)
        samples = [self._pool.sample(task.group, index, task.prompt_tokens, self._version, text, task.label) for index in range(task.n)]
        for item in samples:
            item.check()  # as rollout does with what an engine answered
        encoded = sample.encode(samples, self._config.store.blob_bytes)
        keys = [self._names.payload_key(task.group, task.attempt, part) for part in range(len(encoded))]
        written = dict(zip(keys, encoded, strict=True))
        blobs.update(written)
        return Scored(
            group=task.group,
            attempt=task.attempt,
            payload=reference(self._names.run, written, [one.length for one in samples]),
            samples=[one.meta(one.token_digest()) for one in samples],
            rewards=[float(index % 2) for index in range(task.n)],
            replica="producer",
            environment=task.environment,
            started=started,
            ended=time.time(),
        )


async def main(run: str, length: int) -> None:
    bus = await Bus.connect(os.environ["NATS_URL"], "producer")
    store = Store(os.environ["REDIS_URL"], run)
    settle()  # as every service does
    await Producer(bus, store, await runs.load(bus, run), length).run()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
