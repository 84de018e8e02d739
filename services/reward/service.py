"""The reward service on the bus: takes references, reads the samples, scores them, sends the rewards on."""

from __future__ import annotations

import asyncio
import time

from services.reward.pool import VerifierFailed, VerifierPool
from shared import sample
from shared.cancel import cancelled
from shared.errors import BadMessage, DeadlineExceeded, PayloadMissing
from shared.messages import Failed, Generated, Outcome, Score, Scored
from shared.queue import Lease, WorkQueue
from shared.service import Service
from shared.streams import generated_consumer

IN_HAND = 4
"""Groups in hand for each verifier process: the next one's payload is read while this one is scored."""


class Reward:
    """Scores the groups of one environment."""

    def __init__(self, service: Service) -> None:
        self._service, self._config = service, service.config.reward
        self._environment = self._config.rm_type
        self._pool = VerifierPool(self._environment, self._config.reward_workers)

    async def run(self) -> None:
        """Scores until asked to stop; what is in hand then goes back to the queue by itself."""
        service = self._service
        await self._pool.start()
        service.state = "ready"
        queue = WorkQueue(service.bus, generated_consumer(service.run, service.config.bus, self._environment), Generated)
        limit = self._config.reward_workers * IN_HAND
        running: set[asyncio.Task[None]] = set()
        try:
            while not service.stopping.is_set():
                for lease in await queue.fetch(limit - len(running)):
                    running.add(asyncio.create_task(self._handle(lease)))
                if len(running) >= limit:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task.done()]:
                    running.discard(task)
                    task.result()
                service.metrics.set("scoring", len(running))
        finally:
            await cancelled(running)
            await self._pool.close()

    async def _handle(self, lease: Lease[Generated]) -> None:
        group = lease.message
        async with lease.held():
            outcome = await self._outcome(lease)
            msg_id = f"{group.group}.{group.attempt}"
            await self._service.bus.publish(self._service.subjects.scored, outcome, msg_id=msg_id, deadline=600)
        await lease.ack()

    async def _outcome(self, lease: Lease[Generated]) -> Outcome:
        group, log = lease.message, self._service.log.bind(group=lease.message.group)
        if lease.exhausted:
            return self._failed(group, f"given up after {lease.deliveries - 1} deliveries")
        try:
            scores = await self._score(group)
        except (PayloadMissing, BadMessage, VerifierFailed, DeadlineExceeded) as error:
            log.warning("group_not_scored", error=str(error))
            return self._failed(group, str(error))
        self._service.metrics.add("samples_scored", len(scores))
        return Scored(
            group=group.group,
            attempt=group.attempt,
            payload=group.payload,
            samples=group.samples,
            scores=scores,
            replica=group.replica,
            environment=self._environment,
            started=group.started,
            ended=group.ended,
        )

    async def _score(self, group: Generated) -> list[Score]:
        started = time.monotonic()
        samples = sample.decode(await self._service.store.read(group.payload.keys))
        if len(samples) != len(group.samples):
            raise BadMessage(f"{group.group}: the payload holds {len(samples)} samples, its reference {len(group.samples)}")
        if not samples:
            raise BadMessage(f"{group.group}: the payload holds no sample")
        label = samples[0].label
        if label is None:
            raise VerifierFailed(f"verifier {self._environment} needs a label and the prompt has none")
        rewards = await self._pool.score([one.text for one in samples], label, self._config.reward_timeout)
        self._service.metrics.set("score_seconds", time.monotonic() - started)
        return [Score(reward=reward) for reward in rewards]

    def _failed(self, group: Generated, reason: str) -> Failed:
        return Failed(group=group.group, attempt=group.attempt, reason=reason, by=self._service.instance, payload=group.payload)


async def serve(service: Service) -> None:
    """The body of the reward service."""
    await Reward(service).run()
