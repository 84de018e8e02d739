"""Rank 0 of a weight push, as a trainer has it: a private process group beside torch's own, and flattened broadcasts.

The engine names the group's store prefix after the group (SGLang's ``init_custom_process_group``); so does this. The
group is torch's private construction because a public ``new_group`` needs a default group that all ranks are in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

from services.rollout.engine.client import EngineClient
from shared.embedded import free_port

NamedTensors = Sequence[tuple[str, torch.Tensor]]

JOIN_SECONDS = 120.0


class WeightsGroup:
    """A gloo group of this process, rank 0, and engines. Joining blocks, so it is done in a thread."""

    def __init__(self, name: str, port: int, world_size: int) -> None:
        """Open the store, wait for the other ranks, join. Raises torch's ``DistStoreError`` after ``JOIN_SECONDS``."""
        timeout = timedelta(seconds=JOIN_SECONDS)
        self.name = name
        self._store = dist.TCPStore("127.0.0.1", port, world_size, is_master=True, timeout=timeout)
        self._group, _ = _new_process_group_helper(
            world_size, 0, [], dist.Backend("gloo"), PrefixStore(name, self._store), group_name=name, timeout=timeout
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}

    @classmethod
    async def join(cls, client: EngineClient, name: str) -> Self:
        """A group of two: this process and the client's engine."""
        port = free_port()
        group, _ = await asyncio.gather(
            asyncio.to_thread(cls, name, port, 2),
            client.init_weights_group(name, master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, backend="gloo"),
        )
        return group

    def broadcast(self, tensors: NamedTensors) -> None:
        """Send one bucket: the tensors' bytes, one behind the other."""
        flat = torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in tensors])
        dist.broadcast(flat, 0, group=self._group)

    async def send(self, client: EngineClient, tensors: NamedTensors, version: int | None = None, flush: bool = False) -> None:
        """One bucket, announced to the engine and broadcast at the same time."""
        await asyncio.gather(
            client.receive_bucket(
                names=[name for name, _ in tensors],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                shapes=[list(tensor.shape) for _, tensor in tensors],
                group=self.name,
                version=version,
                flush=flush,
            ),
            asyncio.to_thread(self.broadcast, tensors),
        )

    async def push(self, client: EngineClient, model: torch.nn.Module, version: int, buckets: int = 2) -> None:
        """All parameters of ``model``, in ``buckets`` buckets; the last one carries the version."""
        parts = list(split(list(model.named_parameters()), buckets))
        await client.begin_weight_update()
        for number, part in enumerate(parts):
            await self.send(client, part, version if number == len(parts) - 1 else None)
        await client.end_weight_update()

    def leave(self) -> None:
        """Leave the group; its connections end, as they do when this rank dies. The object is of no use afterwards."""
        dist.destroy_process_group(self._group)
        del self._group, self._store  # gloo closes its sockets with the last reference


def split(tensors: NamedTensors, parts: int) -> Iterator[NamedTensors]:
    """``parts`` runs of about equal length."""
    size = -(-len(tensors) // parts)
    for start in range(0, len(tensors), size):
        yield tensors[start : start + size]
