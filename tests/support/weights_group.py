"""The trainer's end of group channels, without a trainer: whole models of plain tensors, pushed to engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from services.rollout.engine.engine_client import EngineClient
from shared.schema.weight_messages import WeightsReceived
from shared.transfer import digest
from shared.transfer.bucket_ring import bucket_views
from shared.transfer.digest import TensorDigest
from shared.transfer.group_channel import GroupSender
from shared.transfer.manifest import Bucket, Manifest, lay_out

Tensors = Mapping[str, torch.Tensor]

JOIN_SECONDS = 120.0
PUSH_SECONDS = 240.0
BUCKET_BYTES = 96 * 1024
"""So that a tiny model takes more buckets than an engine has buffers."""


class WeightsGroup(GroupSender):
    """One channel over gloo, of which this process is the source. Joining and sending block, so they are done in threads."""

    def __init__(self, name: str, world_size: int = 2, address: str = "127.0.0.1") -> None:
        super().__init__(name, address, world_size, torch.device("cpu"))

    def push(
        self, manifest: Manifest, tensors: Tensors, only: slice = slice(None), then: "Callable[[WeightsGroup], None]" = lambda group: None
    ) -> None:
        """Sends the buckets, or ``only`` these, and does ``then``."""
        for index, bucket in enumerate(manifest.buckets[only]):
            flat = self.buffer(index, bucket.nbytes)
            flat.copy_(flat_of(bucket, tensors))
            self.send(index, flat)
        self.finish()
        then(self)

    def die(self) -> None:
        """Leaves the group and ends the store, as when this process dies. The object is of no use afterwards."""
        self.close()
        vars(self).pop("store", None)  # its sockets are closed with the last reference


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
            await client.join_channels([channel.address for channel in channels], 1 + number, timeout=JOIN_SECONDS)
        for channel in channels:
            await asyncio.to_thread(channel.join, JOIN_SECONDS)
        pusher = cls(clients, channels)
        try:
            yield pusher
        finally:
            for client in clients:
                await client.leave_channels()
            for channel in channels:
                channel.die()

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
        deadline: float = PUSH_SECONDS,
    ) -> list[WeightsReceived]:
        """Has the engines take the tensors, spread over the channels; the version is not set.

        Args:
            only: these buckets are really sent. then: what each source does next.
        """
        self.pushes, self.sent = self.pushes + 1, tensors
        names, work = list(tensors), []
        for number, channel in enumerate(self.channels):
            share = {name: tensors[name] for name in names[number :: len(self.channels)]}
            manifest = manifest_of(share)
            channel.announce(self.pushes, manifest, deadline)
            self.known |= known_of(manifest, share)
            work.append(asyncio.to_thread(channel.push, manifest, share, only, then))
        for client in self.clients:
            await client.begin_weight_update()
        channels = [channel.name for channel in self.channels]
        takes = [client.receive(version, self.pushes, channels, check=check, deadline=deadline) for client in self.clients]
        sending = asyncio.gather(*work)
        try:
            taken = await asyncio.gather(*takes)
        except BaseException:
            await asyncio.gather(sending, return_exceptions=True)  # an engine that gives up breaks these off: its own words say why
            raise
        await sending
        for client in self.clients:
            await client.end_weight_update()
        return list(taken)

    async def push(self, tensors: Tensors | torch.nn.Module, version: int) -> list[WeightsReceived]:
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
    for name, view in bucket_views(bucket, flat):
        view.copy_(tensors[name].detach())
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
