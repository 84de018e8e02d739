"""The trainer, as a replica sees it in a push: requests over the bus, bytes by one channel."""

import asyncio
import itertools
from collections.abc import Callable

import torch

from shared.schema.weight_messages import WeightsAbort, WeightsCommit, WeightsPrepare, WeightsReceive, WeightsReceived
from shared.transfer import digest
from shared.transfer.digest import TensorDigest
from tests.integration.engine.bench import Bench
from tests.support.weights_group import WeightsGroup, known_of, manifest_of, parameters

SECONDS = 120.0
NUMBERS = itertools.count()


class Source:
    """One push of a model's parameters as ``version``.

    Args:
        world_size: more than 2: there is a member that never comes.
    """

    def __init__(self, desk: Bench, model: torch.nn.Module, version: int, world_size: int = 2) -> None:
        self._desk, self.version = desk, version
        self.group = WeightsGroup(f"source-{next(NUMBERS)}", world_size)
        self.tensors = parameters(model)
        self.manifest = manifest_of(self.tensors)
        self.known: dict[str, TensorDigest] = known_of(self.manifest, self.tensors)

    @property
    def digest(self) -> str:
        return digest.version_digest(self.known)

    async def prepare(self) -> None:
        """Has the replica join, and joins if nobody else is to come."""
        await self._desk.ask("prepare", WeightsPrepare(version=self.version, channels=[self.group.address], rank=1, deadline=SECONDS))
        if self.group.world_size == 2:
            await asyncio.to_thread(self.group.join, SECONDS)

    async def receive(
        self,
        push: int = 1,
        *,
        check: bool = False,
        only: slice = slice(None),
        then: Callable[[WeightsGroup], None] = lambda group: None,
        deadline: float = SECONDS,
    ) -> WeightsReceived:
        """Has the replica take what is sent meanwhile. ``only``: these buckets are. ``then``: what the source does next."""
        order = WeightsReceive(version=self.version, push=push, channels=[self.group.name], check=check, deadline=deadline)
        self.group.announce(push, self.manifest, deadline)
        sending = asyncio.create_task(asyncio.to_thread(self.group.push, self.manifest, self.tensors, only, then))
        try:
            return await self._desk.ask("receive", order, WeightsReceived)
        finally:
            await sending

    async def commit(self, digest: str) -> None:
        await self._desk.ask("commit", WeightsCommit(version=self.version, digest=digest, deadline=SECONDS))

    async def abort(self, version: int | None = None) -> None:
        await self._desk.ask("abort", WeightsAbort(version=self.version if version is None else version, reason="the test says so"))

    def leave(self) -> None:
        self.group.die()
