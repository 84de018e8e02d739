"""What all ranks do next: rank 0 decides (it has the bus), every rank hears the same order.

Orders travel as integers, a batch as its MessagePack bytes, over a gloo group of the trainer's ranks; nothing is unpickled.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shared.messages import Batch


@dataclass(frozen=True)
class Train:
    """Train this batch."""

    batch: Batch


@dataclass(frozen=True)
class Push:
    """Take part in exporting the weights of ``version``."""

    version: int


@dataclass(frozen=True)
class Wait:
    """Nothing to do yet: come back for the next order."""


@dataclass(frozen=True)
class Leave:
    """Leave the loop: the run is done (``done``) or the trainer was asked to stop."""

    done: bool


Order = Train | Push | Wait | Leave

_WAIT, _TRAIN, _PUSH, _LEAVE = range(4)


class OrderChannel:
    """Spreads rank 0's orders. In a world of one it is a plain hand-over.

    Args:
        timeout: seconds that a rank waits for an order; rank 0 sends one (if only `Wait`) every few seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self._alone = dist.get_rank(), dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))

    def send(self, order: Order) -> Order:
        """Rank 0's side. Returns the order."""
        if self._alone:
            return order
        match order:
            case Train(batch=batch):
                payload = torch.frombuffer(bytearray(batch.encode()), dtype=torch.uint8)
                self._broadcast(torch.tensor([_TRAIN, len(payload)]))
                self._broadcast(payload)
            case Push(version=version):
                self._broadcast(torch.tensor([_PUSH, version]))
            case Leave(done=done):
                self._broadcast(torch.tensor([_LEAVE, int(done)]))
            case Wait():
                self._broadcast(torch.tensor([_WAIT, 0]))
        return order

    def receive(self) -> Order:
        """The other ranks' side."""
        head = torch.zeros(2, dtype=torch.int64)
        self._broadcast(head)
        kind, value = int(head[0]), int(head[1])
        if kind == _TRAIN:
            payload = torch.empty(value, dtype=torch.uint8)
            self._broadcast(payload)
            return Train(Batch.decode(payload.numpy().tobytes()))
        if kind == _PUSH:
            return Push(value)
        return Leave(bool(value)) if kind == _LEAVE else Wait()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._group)
