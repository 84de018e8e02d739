"""The commands for all ranks: rank 0 decides (it has the bus), every rank gets the same command.

A command travels as JSON, with the batches of `Train` and `Value` as MessagePack behind it, over a gloo group of the trainer's ranks;
nothing is unpickled.
"""

import datetime
import json
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from shared.schema.messages import Batch


@dataclass(frozen=True)
class Train:
    """Train this batch. ``ahead``: the batch after it, where it is there already: its samples can be read meanwhile."""

    batch: Batch
    ahead: Batch | None = None


@dataclass(frozen=True)
class Value:
    """Compute the values of this batch's tokens, as a critic does before it trains the batch."""

    batch: Batch


@dataclass(frozen=True)
class Push:
    """Begin a push of ``version``, which runs beside the commands that follow.

    Args:
        number: identifies the push in rank 0's process. engine_ranks: those that new channels are made for; 0: the channels stay.
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
    """Do nothing yet, and receive the next command."""


@dataclass(frozen=True)
class Leave:
    """Leave the loop: the run is done (``done``) or the trainer was asked to stop."""

    done: bool


Command = Train | Value | Push | Snapshot | Wait | Leave

_PLAIN: dict[str, type[Push | Snapshot | Wait | Leave]] = {kind.__name__: kind for kind in (Push, Snapshot, Wait, Leave)}


class CommandBroadcast:
    """Broadcasts rank 0's commands. In a world of one the command is only returned.

    Args:
        timeout: seconds that a rank waits for a command; rank 0 sends one (if only `Wait`) every few seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._alone = dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))

    def send(self, command: Command) -> Command:
        """Sends rank 0's command to the other ranks and returns it."""
        if self._alone:
            return command
        match command:
            case Train(batch=batch, ahead=ahead):
                self._send("Train", {}, *(item.encode() for item in (batch, ahead) if item is not None))
            case Value(batch=batch):
                self._send("Value", {}, batch.encode())
            case _:
                self._send(type(command).__name__, asdict(command))
        return command

    def receive(self) -> Command:
        """Returns the command that rank 0 sends, on the other ranks."""
        sizes = torch.zeros(3, dtype=torch.int64)
        self._broadcast(sizes)
        head, *payloads = [self._payload(size) for size in sizes.tolist() if size]
        kind, fields = json.loads(head)
        if kind in _PLAIN:
            return _PLAIN[kind](**fields)
        batches = [Batch.decode(payload) for payload in payloads]
        return Train(*batches) if kind == "Train" else Value(*batches)

    def _send(self, kind: str, fields: dict[str, object], *payloads: bytes) -> None:
        """Sends the sizes of three parts, then the parts: kind and fields, up to two batches."""
        parts = [json.dumps([kind, fields]).encode(), *payloads]
        self._broadcast(torch.tensor([len(part) for part in parts] + [0] * (3 - len(parts))))
        for part in parts:
            self._broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def _payload(self, size: int) -> bytes:
        payload = torch.empty(size, dtype=torch.uint8)
        self._broadcast(payload)
        return payload.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._group)
