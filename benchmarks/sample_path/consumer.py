"""The trainer's end, without a trainer: asks for the batch of each step, reads its payloads, compares every value, reports the step as
trained, pushes the next version live, and every few steps a checkpoint as durable, so that the buffer frees what lies before it.

Tells on standard output, a line a step, how many samples it has compared so far.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.sample_path.content import Pool, Prompts
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.schema import sample
from shared.schema.digests import TrainedSample, attest
from shared.schema.messages import Accepted, Batch, BatchAnswer, BatchPending, BatchRequest, Durable, Trained
from shared.schema.weight_messages import WeightsLive
from shared.store.payload_store import BlockingStore

SAVE_EVERY = 4
"""Steps between durable checkpoints."""

SECONDS = 60.0


class Consumer:
    """A trainer that trains nothing."""

    def __init__(self, bus: Bus, store: BlockingStore, config: RunConfig, length: int) -> None:
        self._bus, self._store, self._names = bus, store, Subjects(config.run.name)
        self._pool, self._prompts = Pool(length), Prompts().tokens
        self._samples = 0

    async def run(self) -> None:
        """Works until cancelled."""
        step = 0
        await self._live(0)
        while True:
            batch = await self._batch(step)
            started = time.time()
            report = Trained(step=step, version=step + 1, started=started, ended=time.time(), attestation=attest(self._read(batch)))
            await self._bus.request(self._names.trained, report, Accepted, deadline=SECONDS, awaited_from="the buffer")
            step += 1
            await self._live(step)
            if step % SAVE_EVERY == 0:
                await self._bus.request(self._names.durable, Durable(steps=step), Accepted, deadline=SECONDS, awaited_from="the buffer")
            print(self._samples, flush=True)

    async def _batch(self, step: int) -> Batch:
        end = time.monotonic() + SECONDS
        while True:
            answer = await self._bus.request(
                self._names.batch, BatchRequest(step=step, version=step), BatchAnswer, deadline=SECONDS, awaited_from="the buffer"
            )
            if isinstance(answer, Batch):
                return answer
            if not isinstance(answer, BatchPending) or time.monotonic() > end:
                raise RuntimeError(f"no batch for step {step}: {answer}")

    def _read(self, batch: Batch) -> Iterator[TrainedSample]:
        payloads = self._store.stream([group.payload for group in batch.groups])
        for group, blobs in zip(batch.groups, payloads, strict=True):
            samples = sample.decode(blobs)
            if len(samples) != len(group.rewards):
                raise AssertionError(f"{group.group}: {len(samples)} samples in the store, {len(group.rewards)} rewards")
            for index, one in enumerate(samples):
                self._pool.check(group.group, index, one)
                if one.prompt.tobytes() != self._prompts[one.prompt_text]:
                    raise AssertionError(f"the prompt of {group.group} is not what the buffer sent")
                yield TrainedSample(group.group, index, int(np.count_nonzero(one.mask)), one.segments[0][2], one.token_digest())
            self._samples += len(samples)

    async def _live(self, version: int) -> None:
        news = WeightsLive(version=version, replicas=["producer"], seconds=0.0, bytes=0, at=time.time())
        await self._bus.put(self._names.weights_bucket, "live", news.encode())
        await self._bus.publish(self._names.event("weights", "live"), news)


async def main(run: str, length: int) -> None:
    bus = await Bus.connect(os.environ["NATS_URL"], "consumer")
    store = BlockingStore(os.environ["REDIS_URL"], run)
    await Consumer(bus, store, await runs.load(bus, run), length).run()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
