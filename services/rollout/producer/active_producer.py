"""Keeps the run's rollout function at work in one replica, as slime has one: the others stand by, and their engines work for it.

Two of them would each draw a part of a batch and wait for the rest. The active one holds the lease ``producer``
(`shared.bus.leader_lease`), and does nothing for its function without it. When it ends, or cannot renew its lease, what it had in hand goes
back to the queue, and another calls the function from there; a group that it had handed in stays handed in.
"""

import asyncio

from services.rollout.producer.engine_spread import EngineSpread
from services.rollout.producer.producer import Producer
from shared.bus.leader_lease import LeaderLease, LeaseLost, LeaseTiming
from shared.bus.subjects import PRODUCER
from shared.runtime.tasks import cancelled
from shared.service.service_base import Service


class ActiveProducer:
    """Runs a replica's producer while it is the run's only one."""

    def __init__(self, service: Service, producer: Producer, spread: EngineSpread) -> None:
        self._service, self._producer, self._spread = service, producer, spread

    async def run(self) -> None:
        """Stands by, or produces, until cancelled. Raises as `Producer.run`."""
        while True:
            timing = LeaseTiming(self._service.config.bus.lease_duration)
            lease = LeaderLease(self._service.bus, self._service.run, PRODUCER, self._service.instance, timing)
            await self._stand_by(lease)
            try:
                await self._produce(lease)
            except LeaseLost as error:
                self._service.log.warning("producer_lease_lost", error=str(error), next_action="its groups go back; it stands by")

    async def _stand_by(self, lease: LeaderLease) -> None:
        said = False
        while not await lease.attempt():
            if not said:
                self._service.log.info("rollout_function_stands_by", reason="another replica runs it")
                said = True
            await asyncio.sleep(lease.timing.poll)

    async def _produce(self, lease: LeaderLease) -> None:
        self._service.log.info("rollout_function_runs_here")
        self._producer.allowed = lease.held
        work = {asyncio.create_task(one) for one in (self._producer.run(), lease.keep(), self._spread.keep())}
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancelled(work)
            await lease.release()
