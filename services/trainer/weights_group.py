"""The process group that carries weights: the trainer's rank 0 and the engines' ranks, apart from the trainer's own groups.

SGLang joins with a private group over a TCP store whose prefix is the group's name; this is the other half of that handshake.
"""

from __future__ import annotations

import datetime
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world


class WeightsGroup:
    """A group of ``world_size`` ranks in which this process is rank 0.

    Args:
        name: known to all members. address, port: where this process opens the store. backend: ``gloo`` or ``nccl``.
        timeout: seconds that joining and every broadcast may take.

    Making one blocks until every member has joined.
    """

    def __init__(self, name: str, address: str, port: int, world_size: int, backend: str, timeout: float) -> None:
        self.name, self.world_size = name, world_size
        limit = datetime.timedelta(seconds=timeout)
        # not torch's rendezvous("tcp://…"): under torchrun that makes rank 0 a client of a store nobody opened
        self._store = TCPStore(address, port, world_size, is_master=True, timeout=limit, wait_for_workers=False)
        self._group, _ = _new_process_group_helper(
            world_size,
            0,
            [],
            dist.Backend(backend),
            PrefixStore(name, self._store),
            group_name=name,  # type: ignore[arg-type]  # a plain string in some releases of torch, a NewType of it in others
            backend_options=None,
            timeout=limit,
        )
        _world.pg_group_ranks[self._group] = {index: index for index in range(world_size)}

    def broadcast(self, flat: torch.Tensor) -> None:
        """Sends a flat tensor from this rank to all others and waits for it."""
        dist.broadcast(flat, src=0, group=self._group)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def close(self) -> None:
        """Leaves the group; the engines leave on their own side."""
        dist.destroy_process_group(self._group)


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The tensors' bytes end to end: uint8 [total bytes], on their device."""
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def own_address() -> str:
    """The address by which engines reach this process: loopback unless ``MYXO_HOST`` says otherwise."""
    host = os.environ.get("MYXO_HOST", "127.0.0.1")
    return socket.gethostbyname(host)
