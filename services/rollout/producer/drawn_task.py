"""A task of the buffer's that a rollout function has, and the lease that is kept for it."""

import asyncio
from dataclasses import dataclass, field

from shared.bus.work_queue import MessageLease
from shared.runtime.errors import BadMessage
from shared.schema.messages import Task
from shared.schema.sample import Sample


@dataclass
class DrawnTask:
    """A task that the function has. ``begun``: seconds since the epoch. ``ended``: set when its lease ends."""

    lease: MessageLease[Task]
    begun: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Task[None] | None = None

    @property
    def task(self) -> Task:
        return self.lease.message

    def hold(self) -> None:
        """Extends the lease until `release`."""

        async def held() -> None:
            async with self.lease.held():
                await self.ended.wait()

        self.holding = asyncio.create_task(held())

    def release(self) -> None:
        self.ended.set()

    def check(self, samples: list[Sample]) -> None:
        """Raises BadMessage for samples that are not of this task, or that train nothing."""
        group = self.task.group
        if [sample.name for sample in samples] != [f"{group}/{index}" for index in range(len(samples))]:
            raise BadMessage(f"its samples are not those of group {group}")
        if not any(sample.mask.any() for sample in samples):
            raise BadMessage(f"no token of group {group} is trained: the loss mask is 0 on all of them")
