"""The commands for all ranks: rank 0 decides (it has the bus), every rank gets the same command.

A command travels as MessagePack over a gloo group of the trainer's ranks; nothing is unpickled.
"""

import datetime
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from services.trainer.parallel import runtime
from shared.schema import codec
from shared.schema import messages as schema
from shared.schema.messages import Batch


@dataclass(frozen=True)
class Resume:
    """Go back to the checkpoint of ``step``, or begin anew where it is None; the first command of all."""

    step: int | None


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
        number: identifies the push in rank 0's process. engine_ranks: those that new channels are made for, by the address of their machine
            (empty where that does not matter); none: the channels stay.
        partial: without frozen parameters.
    """

    version: int
    number: int
    engine_ranks: dict[str, int] = field(default_factory=dict)
    partial: bool = False


@dataclass(frozen=True)
class Lend:
    """Lend the GPUs to their engines (`lend_gpus`), with a push to them first; without it they hold the version."""

    push: Push | None = None


@dataclass(frozen=True)
class Snapshot:
    """Write the weights of ``version`` to disk for the engines."""

    version: int


@dataclass(frozen=True)
class Wait:
    """Do nothing yet, and receive the next command. ``save``: make what was trained durable first, so that payloads can be freed."""

    save: bool = False


@dataclass(frozen=True)
class Leave:
    """Leave the loop: the run is done (``done``) or the trainer was asked to stop."""

    done: bool


@dataclass(frozen=True)
class Execute:
    """Carry out a command from outside. ``replayed``: its outcome is in the log already; it only has to change the client's state again."""

    command: schema.Command
    replayed: bool = False


Command = Resume | Train | Value | Push | Lend | Snapshot | Execute | Wait | Leave

_FORMS: dict[str, TypeAdapter[Command]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Command)}


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
        if not self._alone:
            kind = type(command).__name__
            payload = codec.pack([kind, _FORMS[kind].dump_python(command)])
            self._broadcast(torch.tensor([len(payload)]))
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        return command

    def receive(self) -> Command:
        """Returns the command that rank 0 sends, on the other ranks."""
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        payload = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        kind, fields = codec.unpack(payload.numpy().tobytes())
        return _FORMS[kind].validate_python(fields)

    def gather(self, value: Any) -> list[Any]:
        """Returns ``value``, plain data, of every rank, in their order, on every rank."""
        return [value] if self._alone else runtime.gather_json(value, self._group)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor
