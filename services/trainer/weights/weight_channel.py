"""What carries the buckets of a push from one of the trainer's ranks to the engines. Two kinds: `group` and `memory`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shared.schema.messages import WeightChannelAddress
from shared.transfer.manifest import Manifest

BUFFERS = 3
"""Flat buffers of a channel: one is filled, one is on the wire, one is being loaded."""


class WeightChannelBroken(RuntimeError):
    """A channel that carries nothing any more, and why."""


class WeightChannel(Protocol):
    """The source's end. All methods are called on one thread, but for `abort`; waits end with the channel's deadline, or with `abort`."""

    name: str

    def address(self) -> WeightChannelAddress:
        """Where the engines find it."""
        ...

    def join(self, seconds: float) -> None:
        """Returns once every engine rank has joined. Raises LaneBroken."""
        ...

    def announce(self, push: int, manifest: Manifest, seconds: float) -> None:
        """Says what the buckets of a push hold; they follow, in order. ``seconds``: for all of it."""
        ...

    def buffer(self, number: int, nbytes: int) -> Tensor:
        """Where to put bucket ``number`` of the push: uint8 [nbytes], on the model's device.

        On a GPU it is free in the current stream's order.
        """
        ...

    def send(self, number: int, flat: Tensor) -> None:
        """Sends what `buffer` gave, which the current stream has filled. Returns before it has arrived."""
        ...

    def finish(self) -> None:
        """Returns once every bucket has left this side. Raises LaneBroken."""
        ...

    def abort(self, reason: str) -> None:
        """Ends whatever the channel waits for, from any thread; it is of no use afterwards."""
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...
