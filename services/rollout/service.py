"""The rollout service on the bus: takes tasks while its replica serves weights, writes samples, sends references on."""

from __future__ import annotations

import asyncio
import time

from services.rollout.engine.errors import EngineError, InvalidRequest
from services.rollout.generate import generate_group
from services.rollout.replica import Replica
from services.rollout.router import Router, router_url
from services.rollout.weights import WeightsReceiver
from shared import sample
from shared.cancel import cancelled
from shared.errors import BadMessage, DeadlineExceeded
from shared.messages import Failed, Generated, Message, Payload, Task
from shared.queue import Lease, WorkQueue
from shared.service import Service
from shared.streams import task_consumer
from shared.subjects import EVAL, TRAIN
from shared.tokenizer import Tokenizer

LOOK_SECONDS = 0.05
"""How often a replica without weights or room looks whether it has them."""

RATE_SECONDS = 2.0
"""Period over which tokens per second are measured."""


class Rollout:
    """One replica at work."""

    def __init__(self, service: Service) -> None:
        self._service, self._config = service, service.config
        self._tokenizer = Tokenizer(service.config.model.hf_checkpoint)
        self._replica = Replica(service)
        self._weights = WeightsReceiver(service, self._replica)
        self._running: set[asyncio.Task[None]] = set()
        self._samples_running = 0
        self._tokens = 0

    async def run(self) -> None:
        """Works until asked to stop; groups in hand then go back to the queue."""
        service = self._service
        await self._weights.listen()
        work = [self._replica.keep_engine(), self._measure(), self._take(EVAL), self._take(TRAIN)]
        router = Router(service, url) if (url := router_url()) else None
        if router is not None:
            work.append(router.keep())
        async with service.background(*work):
            try:
                await service.stopping.wait()
            finally:
                await cancelled(self._running)
                if router is not None:
                    await router.leave()

    async def _take(self, task_class: str) -> None:
        """Fetches tasks of a class while the replica serves and has room; training tasks wait while evaluations fill it."""
        service, limit = self._service, self._config.rollout.rollout_concurrency
        queue = WorkQueue(service.bus, task_consumer(service.run, self._config.bus, task_class), Task)
        while not service.stopping.is_set():
            room = limit - len(self._running)
            if not self._replica.serving or room <= 0:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            for lease in await queue.fetch(room):
                self._running.add(handling := asyncio.create_task(self._handle(lease)))
                handling.add_done_callback(self._handled)

    def _handled(self, handling: asyncio.Task[None]) -> None:
        self._running.discard(handling)
        if not handling.cancelled() and (error := handling.exception()) is not None:
            self._service.log.error("task_failed", error=f"{type(error).__name__}: {error}", exc_info=error)

    async def _handle(self, lease: Lease[Task]) -> None:
        task, service = lease.message, self._service
        log = service.log.bind(group=task.group, attempt=task.attempt)
        self._samples_running += task.n
        try:
            async with lease.held():
                if lease.exhausted:
                    await self._give_up(task, f"given up after {lease.deliveries - 1} deliveries")
                else:
                    await self._publish(service.subjects.generated(task.environment), task, await self._generate(task))
            await lease.ack()
        except asyncio.CancelledError:
            await lease.hand_back()
            raise
        except (DeadlineExceeded, EngineError) as error:
            log.warning("group_handed_back", error=str(error))
            await lease.hand_back(delay=1.0)
        except (BadMessage, InvalidRequest) as error:  # a task that can never work: its prompt does not fit the model
            log.warning("group_refused", error=str(error))
            await self._give_up(task, str(error))
            await lease.ack()
        finally:
            self._samples_running -= task.n

    async def _generate(self, task: Task) -> Generated:
        service = self._service
        started = time.time()
        samples = await generate_group(self._replica, task, self._tokenizer, self._config.rollout.generate_timeout)
        ended = time.time()
        self._tokens += sum(len(one.response) for one in samples)
        blobs = sample.encode(samples, self._config.store.blob_bytes)
        keys = [service.subjects.payload_key(task.group, task.attempt, part) for part in range(len(blobs))]
        await service.store.write(dict(zip(keys, blobs, strict=True)))
        return Generated(
            group=task.group,
            attempt=task.attempt,
            payload=Payload(keys=keys, bytes=sum(len(blob) for blob in blobs)),
            samples=[one.meta() for one in samples],
            replica=service.instance,
            started=started,
            ended=ended,
        )

    async def _give_up(self, task: Task, reason: str) -> None:
        failed = Failed(group=task.group, attempt=task.attempt, reason=reason, by=self._service.instance)
        await self._publish(self._service.subjects.scored, task, failed)

    async def _publish(self, subject: str, task: Task, message: Message) -> None:
        await self._service.bus.publish(subject, message, msg_id=f"{task.group}.{task.attempt}", deadline=600)

    async def _measure(self) -> None:
        """Keeps the gauges."""
        last, at = self._tokens, time.monotonic()
        while True:
            await asyncio.sleep(RATE_SECONDS)
            now = time.monotonic()
            metrics = self._service.metrics
            metrics.set("generated_tokens_per_s", (self._tokens - last) / (now - at))
            metrics.set("generated_tokens", self._tokens)
            metrics.set("running_groups", len(self._running))
            metrics.set("running_samples", self._samples_running)
            last, at = self._tokens, now


async def serve(service: Service) -> None:
    """The body of the rollout service."""
    await Rollout(service).run()
