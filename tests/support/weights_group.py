"""The trainer's end of a group channel, as a trainer has it: a store with manifests, a process group, flat buckets by broadcast.

The group is torch's own construction beside a default one, as trainers make it; the engine's end builds the same keys by other means.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.receiver_client import ReceiveReport
from shared.schema.messages import WeightChannelAddress
from shared.transfer import digest
from shared.transfer.digest import TensorDigest
from shared.transfer.manifest import Bucket, Manifest, lay_out

Tensors = Mapping[str, torch.Tensor]

JOIN_SECONDS = 120.0
BUCKET_BYTES = 96 * 1024
"""So that a tiny model takes more buckets than an engine has buffers."""


class WeightsGroup:
    """One channel over gloo, of which this process is the source. Joining and broadcasting block, so they are done in threads."""

    def __init__(self, name: str, world_size: int = 2) -> None:
        """Opens the store. The group is made by `join`."""
        self.name, self.world_size = name, world_size
        self.store = TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=timedelta(seconds=JOIN_SECONDS), wait_for_workers=False)
        self._group: Any = None
        self._announced = ""

    @property
    def channel(self) -> WeightChannelAddress:
        """What engines are told of it."""
        return WeightChannelAddress(
            kind="group", name=self.name, address="127.0.0.1", port=self.store.port, backend="gloo", world_size=self.world_size
        )

    def meet(self) -> None:
        """Returns once every engine has joined. Raises torch's ``DistStoreError`` after ``JOIN_SECONDS``."""
        self._group, _ = _new_process_group_helper(
            self.world_size,
            0,
            [],
            dist.Backend("gloo"),
            PrefixStore(self.name, self.store),
            group_name=self.name,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(self.world_size)}
        dist.broadcast(torch.zeros(1, dtype=torch.uint8), 0, group=self._group)

    def announce(self, push: int, manifest: Manifest) -> None:
        """Says what the buckets of a push hold."""
        repeated, self._announced = manifest.id == self._announced, manifest.id
        self.store.set(f"manifest/{push}", b"=" if repeated else b"M" + manifest.encoded)

    def send(
        self,
        manifest: Manifest,
        tensors: Tensors,
        only: slice = slice(None),
        then: Callable[[WeightsGroup], None] = lambda group: None,
    ) -> None:
        """Sends the buckets, or ``only`` these, and does ``then``."""
        for bucket in manifest.buckets[only]:
            dist.broadcast(flat_of(bucket, tensors), 0, group=self._group)
        then(self)

    def leave(self) -> None:
        """Leaves the group and ends the store, as when this process dies. The object is of no use afterwards."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group, self.store = None, None  # type: ignore[assignment]  # gloo and the store close their sockets with the last reference


@dataclass
class Pusher:
    """Pushes to one or more engines that have joined the same channels.

    Args:
        clients: of the engines. channels: each gets its share of every push.
    """

    clients: Sequence[EngineClient]
    channels: Sequence[WeightsGroup]
    pushes: int = 0
    known: dict[str, TensorDigest] = field(default_factory=dict)
    sent: Tensors = field(default_factory=dict)

    @classmethod
    @contextlib.asynccontextmanager
    async def over(cls, *clients: EngineClient, names: Sequence[str] = ("trainer",)) -> AsyncIterator[Self]:
        """Channels of these names, to all clients' engines; left at the end."""
        channels = [WeightsGroup(name, 1 + len(clients)) for name in names]
        for number, client in enumerate(clients):
            await client.join_channels([channel.channel for channel in channels], 1 + number, timeout=JOIN_SECONDS)
        for channel in channels:
            await asyncio.to_thread(channel.meet)
        pusher = cls(clients, channels)
        try:
            yield pusher
        finally:
            for client in clients:
                await client.leave_channels()
            for channel in channels:
                channel.leave()

    @property
    def digest(self) -> str:
        """Of everything that was pushed, as it was pushed last."""
        return digest.version_digest(self.known)

    async def send(
        self,
        tensors: Tensors,
        version: int,
        *,
        check: bool = False,
        only: slice = slice(None),
        then: Callable[[WeightsGroup], None] = lambda channel: None,
        deadline: float = 60.0,
    ) -> list[ReceiveReport]:
        """Has the engines take the tensors, spread over the channels; the version is not set.

        Args:
            only: these buckets are really sent. then: what each source does next.
        """
        self.pushes, self.sent = self.pushes + 1, tensors
        names, work = list(tensors), []
        for number, channel in enumerate(self.channels):
            share = {name: tensors[name] for name in names[number :: len(self.channels)]}
            manifest = manifest_of(share)
            channel.announce(self.pushes, manifest)
            self.known |= known_of(manifest, share)
            work.append(asyncio.to_thread(channel.send, manifest, share, only, then))
        for client in self.clients:
            await client.begin_weight_update()
        channels = [channel.name for channel in self.channels]
        takes = [client.receive(version, self.pushes, channels, check=check, deadline=deadline) for client in self.clients]
        sending = asyncio.gather(*work)
        try:
            taken = await asyncio.gather(*takes)
        finally:
            await sending
        for client in self.clients:
            await client.end_weight_update()
        return list(taken)

    async def push(self, tensors: Tensors | torch.nn.Module, version: int) -> list[ReceiveReport]:
        """Has the engines take and name a version."""
        taken = await self.send(parameters(tensors), version)
        for client in self.clients:
            await client.set_weight_version(version)
        return taken


def parameters(tensors: Tensors | torch.nn.Module) -> Tensors:
    """A model's parameters by name."""
    return dict(tensors.named_parameters()) if isinstance(tensors, torch.nn.Module) else tensors


def flat_of(bucket: Bucket, tensors: Tensors) -> torch.Tensor:
    """A bucket's bytes: uint8."""
    flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    for slot in bucket.slots:
        flat[slot.offset : slot.offset + slot.nbytes] = tensors[slot.name].detach().contiguous().view(-1).view(torch.uint8)
    return flat


def manifest_of(tensors: Tensors, bucket_bytes: int = BUCKET_BYTES) -> Manifest:
    """The tensors in order, in buckets."""
    return lay_out([(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors.items()], bucket_bytes)


def known_of(manifest: Manifest, tensors: Tensors) -> dict[str, TensorDigest]:
    """What an engine knows that has received the tensors."""
    known: dict[str, TensorDigest] = {}
    for bucket in manifest.buckets:
        known |= digest.tensors(bucket, digest.leaves(flat_of(bucket, tensors).numpy(), digest.leaf_table(bucket)))
    return known
