"""What all ranks do next: rank 0 decides (it has the bus), every rank hears the same order.

Orders travel as integers, a batch as its MessagePack bytes, a push as JSON, over a gloo group of the trainer's ranks; nothing is unpickled.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from shared.schema.messages import Batch


@dataclass(frozen=True)
class Train:
    """Train this batch. ``ahead``: the one after it, where it is there already: its samples can be read meanwhile."""

    batch: Batch
    ahead: Batch | None = None


@dataclass(frozen=True)
class Value:
    """Give this batch's tokens their values: what a critic does before it trains it."""

    batch: Batch


@dataclass(frozen=True)
class Push:
    """Begin a push of ``version``, beside what follows.

    Args:
        number: of the push in rank 0's life. engine_ranks: that new channels are made with; 0: the channels there are.
        partial: without frozen parameters.
    """

    version: int
    number: int
    engine_ranks: int = 0
    partial: bool = False


@dataclass(frozen=True)
class Snapshot:
    """Write the weights of ``version`` to disk for the engines."""

    version: int


@dataclass(frozen=True)
class Wait:
    """Nothing to do yet: come back for the next order."""


@dataclass(frozen=True)
class Leave:
    """Leave the loop: the run is done (``done``) or the trainer was asked to stop."""

    done: bool


Order = Train | Value | Push | Snapshot | Wait | Leave

_WAIT, _TRAIN, _PUSH, _LEAVE, _VALUE, _SNAPSHOT = range(6)


class CommandBroadcast:
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
            case Train(batch=batch, ahead=ahead):
                self._send(_TRAIN, *(one.encode() for one in (batch, ahead) if one is not None))
            case Value(batch=batch):
                self._send(_VALUE, batch.encode())
            case Push():
                self._send(_PUSH, json.dumps(asdict(order)).encode())
            case Snapshot(version=version):
                self._send(_SNAPSHOT, value=version)
            case Leave(done=done):
                self._send(_LEAVE, value=int(done))
            case Wait():
                self._send(_WAIT)
        return order

    def receive(self) -> Order:
        """The other ranks' side."""
        head = torch.zeros(4, dtype=torch.int64)
        self._broadcast(head)
        kind, value, *sizes = head.tolist()
        payloads = [self._payload(size) for size in sizes if size]
        if kind == _TRAIN:
            return Train(*map(Batch.decode, payloads))
        if kind == _VALUE:
            return Value(*map(Batch.decode, payloads))
        if kind == _PUSH:
            return Push(**json.loads(payloads[0]))
        if kind == _SNAPSHOT:
            return Snapshot(value)
        return Leave(bool(value)) if kind == _LEAVE else Wait()

    def _send(self, kind: int, *payloads: bytes, value: int = 0) -> None:
        """A head of four integers (kind, value, sizes of up to two payloads), then the payloads."""
        sizes = [len(payload) for payload in payloads] + [0] * (2 - len(payloads))
        self._broadcast(torch.tensor([kind, value, *sizes]))
        for payload in payloads:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def _payload(self, size: int) -> bytes:
        payload = torch.empty(size, dtype=torch.uint8)
        self._broadcast(payload)
        return payload.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._group)
