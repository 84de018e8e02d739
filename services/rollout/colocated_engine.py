"""Lets a replica sleep while a trainer computes on the same GPUs (`colocate`).

While the trainer computes, nothing is generated, partial samples wait at the gate, and the engine has released its memory. Where it has
released its weights, too, the replica holds no version until the next push. The trainer announces when it begins and ends, and repeats
while it computes that it still does; when these messages stop, the replica treats it as gone and wakes by itself.
"""

import asyncio
import time

from services.rollout.engine.engine_memory import EVERYTHING, WEIGHTS
from services.rollout.replica import OPEN_SECONDS, Replica
from services.rollout.served_version import NO_WEIGHTS
from shared.bus.connection import TRANSIENT
from shared.config import devices
from shared.runtime.errors import MyxoError
from shared.runtime.telemetry import MetricSpec, declare_metrics
from shared.schema.messages import Message
from shared.schema.weight_messages import WeightsAsleep, WeightsReady, WeightsSleep, WeightsWake
from shared.service.service_base import Service

declare_metrics(
    MetricSpec("asleep", "", "1 while a trainer computes on the engine's GPUs", when="with `colocate`"),
    MetricSpec("asleep_seconds", "s", "for which the engine slept last", when="with `colocate`"),
)

POLL_INTERVAL_S = 0.2


class ColocatedEngine:
    """Answers the trainer's requests to sleep and to wake, for one replica."""

    def __init__(self, service: Service, replica: Replica) -> None:
        self._service, self._replica = service, replica
        self._releases = devices.engines_release(service.config)
        self._loses = self._releases and not devices.engines_back_up(service.config)
        self._asleep_until = self._asleep_since = 0.0
        self._watch: asyncio.Task[None] | None = None
        replica.before_start, replica.after_start = self._wait_for_memory, self._sleep_if_late

    async def listen(self) -> None:
        """Subscribes to this replica's subjects, if it shares GPUs at all."""
        if not self._service.config.trainer.colocate:
            return
        bus, subjects, instance = self._service.bus, self._service.subjects, self._service.instance
        await bus.serve(subjects.replica_weights(instance, "sleep"), WeightsSleep, self._sleep)
        await bus.serve(subjects.replica_weights(instance, "wake"), WeightsWake, self._wake)

    async def make_room(self, deadline: float) -> None:
        """Has the engine take memory for weights that are about to be received. The caller holds the update lock."""
        client = self._replica.client
        if client is not None:
            await client.memory.take_back(WEIGHTS, deadline=deadline)

    async def _wait_for_memory(self) -> None:
        """Returns once the engine may take memory: when the trainer does not compute, or has left the registry because it died."""
        logged = False
        while self._releases and (self._replica.served.asleep or await self._trainer_computes()):
            if not logged:
                self._service.log.info("engine_start_waits", reason="the trainer computes on the GPU")
                logged = True
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _sleep_if_late(self) -> None:
        """Puts an engine that has started while the trainer computes to sleep at once."""
        async with self._replica.update_lock:
            if self._replica.served.asleep:
                await self._put_to_sleep(OPEN_SECONDS)
                await self._replica.publish()

    # --- requests

    async def _sleep(self, request: WeightsSleep) -> Message:
        self._asleep_until = time.monotonic() + request.lasts  # before the lock is free: a push of the trainer's may hold it
        if self._watch is None or self._watch.done():
            self._watch = self._service.spawn(self._watch_trainer())
        replica = self._replica
        async with replica.update_lock:
            if not replica.served.asleep:
                replica.served.asleep, self._asleep_since = True, time.monotonic()
                replica.show()
                await self._put_to_sleep(request.deadline)
                self._service.metrics.set("asleep", 1)
                await replica.publish()
                self._service.log.info("asleep", version=replica.version, seconds=round(time.monotonic() - self._asleep_since, 3))
            return WeightsAsleep(replica=self._service.instance, version=replica.version)

    async def _wake(self, request: WeightsWake) -> Message:
        async with self._replica.update_lock:
            await self._awake(request.deadline)
            return WeightsReady(replica=self._service.instance, version=self._replica.version)

    # --- what the requests do; the caller holds the update lock

    async def _put_to_sleep(self, deadline: float) -> None:
        """Puts the engine to sleep. An engine that does not go to sleep is killed, which frees its memory, too."""
        replica = self._replica
        if replica.client is None:  # an engine that is still starting is put to sleep when it is up
            return
        try:
            await replica.client.memory.sleep(EVERYTHING if self._releases else (), deadline=deadline)
            if self._loses:
                await replica.client.adopt(NO_WEIGHTS, {}, deadline=deadline)  # its digests are no longer those of its weights
        except MyxoError as error:
            await replica.kill_engine(f"it did not go to sleep: {error}")
        if self._loses:
            replica.served.lose_weights()

    async def _awake(self, deadline: float) -> None:
        """Serves the version that the replica holds. Without weights, or during a push, that is left to the push."""
        replica, service = self._replica, self._service
        if not replica.served.asleep:
            return
        replica.served.asleep = False
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
        self._watch = None
        service.metrics.set("asleep", 0)
        service.metrics.set("asleep_seconds", time.monotonic() - self._asleep_since)
        if replica.client is not None and replica.served.has_weights and replica.served.target is None:
            try:
                await replica.serve(replica.version, replica.served.digest, deadline=deadline)
            except MyxoError as error:
                await replica.fence(f"the engine did not wake: {error}")
                await replica.kill_engine(str(error))
        else:
            await replica.publish()
        service.log.info("awake", version=replica.version, seconds=round(time.monotonic() - self._asleep_since, 3))

    async def _watch_trainer(self) -> None:
        """Wakes the replica when the trainer's messages have stopped: without this it would sleep for ever."""
        while (left := self._asleep_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, POLL_INTERVAL_S))
        async with self._replica.update_lock:
            if self._asleep_until > time.monotonic():  # a message came while this waited for the lock
                self._watch = self._service.spawn(self._watch_trainer())
                return
            reason = "the trainer fell silent while the replica slept for it"
            self._service.log.warning("turn_expired", reason=reason)
            await self._awake(OPEN_SECONDS)
        await self._service.tell("turn_expired", reason)

    async def _trainer_computes(self) -> bool:
        try:
            return any(status.gauges.get("onloaded") for status in await self._service.registry.alive("trainer"))
        except (MyxoError, *TRANSIENT) as error:
            self._service.log.warning("registry_unread", error=str(error))
            return True
