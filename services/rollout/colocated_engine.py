"""The replica's side of taking turns with a trainer on the same GPUs (`colocate`).

The trainer's turn: nothing is generated, partial samples wait at the gate, the engine has given its memory back. Weights that went with
the memory are gone: the replica then holds no version until a push. The trainer says when its turn begins and ends, and again and again
that it goes on; one that falls silent is taken for gone, and the replica wakes by itself.
"""

from __future__ import annotations

import asyncio
import time

from services.rollout.engine.engine_memory import EVERYTHING, WEIGHTS
from services.rollout.replica import NO_WEIGHTS, Replica
from shared.bus.connection import TRANSIENT
from shared.runtime import devices
from shared.runtime.errors import MyxoError
from shared.runtime.service_base import Service
from shared.schema.messages import Message, WeightsAsleep, WeightsReady, WeightsSleep, WeightsWake

POLL_INTERVAL_S = 0.2
WAKE_SECONDS = 60.0
"""For an engine to take its memory back when the trainer has fallen silent."""


class ColocatedEngine:
    """See the module's docstring.

    Args:
        step: held by whoever changes the engine's weights or memory.
    """

    def __init__(self, service: Service, replica: Replica, step: asyncio.Lock) -> None:
        self._service, self._replica, self._step = service, replica, step
        self._releases = devices.engines_release(service.config)
        self._loses = self._releases and not devices.engines_back_up(service.config)
        self._asleep_until = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._since = 0.0

    async def listen(self) -> None:
        """Subscribes to this replica's subjects, where it shares GPUs at all."""
        if not self._service.config.trainer.colocate:
            return
        bus, subjects, instance = self._service.bus, self._service.subjects, self._service.instance
        await bus.serve(subjects.replica_weights(instance, "sleep"), WeightsSleep, self._sleep)
        await bus.serve(subjects.replica_weights(instance, "wake"), WeightsWake, self._wake)

    async def may_start(self) -> None:
        """Returns when an engine may take memory: outside of the trainer's turn. A trainer that dies leaves the registry."""
        told = False
        while self._releases and (self._replica.asleep or await self._is_trainers_turn()):
            if not told:
                self._service.log.info("engine_start_waits", reason="it is the trainer's turn on the GPU")
                told = True
            await asyncio.sleep(POLL_INTERVAL_S)

    async def started(self) -> None:
        """An engine has come up. In the trainer's turn it goes to sleep at once."""
        async with self._step:
            if self._replica.asleep:
                await self._put_to_sleep(WAKE_SECONDS)
                await self._service.announce()

    async def make_room(self, deadline: float) -> None:
        """Has memory for weights that are about to be received. Called with the step held."""
        client = self._replica.client
        if client is not None:
            await client.occupation.take_back(WEIGHTS, deadline=deadline)

    # --- requests

    async def _sleep(self, request: WeightsSleep) -> Message:
        self._asleep_until = time.monotonic() + request.lasts  # before the step is free: a push of the trainer's may have it
        if self._watch is None or self._watch.done():
            self._watch = self._service.spawn(self._watch_trainer())
        async with self._step:
            replica = self._replica
            if not replica.asleep:
                replica.asleep, self._since = True, time.monotonic()
                replica.close_gate()
                await self._put_to_sleep(request.deadline)
                self._service.metrics.set("asleep", 1)
                await self._service.announce()
                self._service.log.info("asleep", version=replica.version, seconds=round(time.monotonic() - self._since, 3))
            return WeightsAsleep(replica=self._service.instance, version=replica.version)

    async def _wake(self, request: WeightsWake) -> Message:
        async with self._step:
            await self._awake(request.deadline)
            return WeightsReady(replica=self._service.instance, version=self._replica.version)

    # --- what they come down to, with the step held

    async def _put_to_sleep(self, deadline: float) -> None:
        """An engine that does not obey is ended: then its memory is free, too."""
        replica = self._replica
        if replica.client is None:  # a starting one is put to sleep when it is up
            return
        self._service.state = "asleep"
        try:
            await replica.client.occupation.sleep(EVERYTHING if self._releases else (), deadline=deadline)
            if self._loses:
                await replica.client.adopt(NO_WEIGHTS, {}, deadline=deadline)  # what it knows of its weights is over
        except MyxoError as error:
            await replica.kill_engine(f"it did not go to sleep: {error}")
        if self._loses:
            replica.version = self._service.version = NO_WEIGHTS

    async def _awake(self, deadline: float) -> None:
        """Serves what the replica holds. Without weights it stays fenced, its memory released, until a push."""
        replica, service = self._replica, self._service
        if not replica.asleep:
            return
        replica.asleep = False
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
        self._watch = None
        service.metrics.set("asleep", 0)
        service.metrics.set("asleep_seconds", time.monotonic() - self._since)
        if replica.client is not None and replica.version != NO_WEIGHTS:
            try:
                await replica.open_gate(replica.version, deadline=deadline)
            except MyxoError as error:
                await replica.fence(f"the engine did not wake: {error}")
                await replica.kill_engine(str(error))
        else:
            service.state = "fenced" if replica.client is not None else service.state
            await service.announce()
        service.log.info("awake", version=replica.version, seconds=round(time.monotonic() - self._since, 3))

    async def _watch_trainer(self) -> None:
        """Ends a turn whose trainer has fallen silent: without this the replica would sleep for ever."""
        while (left := self._asleep_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, POLL_INTERVAL_S))
        async with self._step:
            if self._asleep_until > time.monotonic():  # it has spoken while the step was not free
                self._watch = self._service.spawn(self._watch_trainer())
                return
            reason = "the trainer fell silent in its turn"
            self._service.log.warning("turn_expired", reason=reason)
            await self._awake(WAKE_SECONDS)
        await self._service.tell("turn_expired", reason)

    async def _is_trainers_turn(self) -> bool:
        try:
            return any(card.gauges.get("turn") for card in await self._service.registry.alive("trainer"))
        except (MyxoError, *TRANSIENT) as error:
            self._service.log.warning("registry_unread", error=str(error))
            return True
