"""What carries buckets into the engine: the protocol that every kind of channel's end keeps, and the rule by which it may be waited for.

Invariant: nothing here waits without looking, at least every `POLL_INTERVAL_S`, whether its deadline has passed or an abort has come. What
cannot be called off (a store that is asked, a process group that is made) runs on a thread of its own, which is left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.schema.messages import WeightChannelAddress
from shared.transfer.manifest import Manifest

POLL_INTERVAL_S = 0.05
"""The longest sleep between two looks at an abort."""

BUFFERS = 3
"""Flat buffers of a channel: one is being loaded, two are on their way."""

EAGER_SECONDS = 0.003
"""For so long a wait on a GPU looks without sleeping: a bucket of 512 MB takes 1.4 ms, a sleep a tenth of that."""


T = TypeVar("T")


class ChannelBroken(MyxoError):
    """A channel that carries nothing any more, and why."""


class Aborted(MyxoError):
    """Somebody has called off what was waited for."""


class ReceiveDeadline:
    """How long a piece of work may take, and who may call it off.

    Args:
        seconds: from now. then: what happens should they pass, for the error.
    """

    def __init__(self, seconds: float, then: str = "the push is given up") -> None:
        self._seconds, self._then = seconds, then
        self._end = time.monotonic() + seconds
        self._called_off = threading.Event()

    def abort(self) -> None:
        """Ends the work's waits soon, from any thread."""
        self._called_off.set()

    @property
    def left(self) -> float:
        """Seconds until the deadline, not below 0."""
        return max(0.0, self._end - time.monotonic())

    def look(self, what: str, whom: str) -> None:
        """Raises Aborted, or DeadlineExceeded that names what is awaited from whom."""
        if self._called_off.is_set():
            raise Aborted(f"{what} from {whom} was called off")
        if time.monotonic() >= self._end:
            raise DeadlineExceeded(what, whom, self._seconds, self._then)

    def until(self, done: Callable[[], bool], what: str, whom: str, look: Callable[[], None] | None = None, *, eager: bool = False) -> None:
        """Returns once ``done()``. ``look``: asked between; may raise. ``eager``: do not sleep for `EAGER_SECONDS`.

        Raises Aborted, DeadlineExceeded.
        """
        begin = time.monotonic()
        while not done():
            self.look(what, whom)
            if look is not None:
                look()
            waited = time.monotonic() - begin
            time.sleep(0 if eager and waited < EAGER_SECONDS else min(POLL_INTERVAL_S, 0.0002 + waited / 10))


def run_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Has ``work`` done on a daemon thread, for what nobody can call off: its waiter may leave it there."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class BucketRing:
    """The flat buffers of one channel, kept between pushes and from one life of the channel to the next: uint8, on the model's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []

    def buffers(self, nbytes: int, count: int) -> list[Tensor]:
        """At least ``count`` (up to `BUFFERS`) of at least ``nbytes`` each."""
        count = min(count, BUFFERS)
        size = max([nbytes, *(buffer.numel() for buffer in self._buffers[:1])])
        if self._buffers and self._buffers[0].numel() < nbytes:
            self._buffers = []
        with torch.inference_mode(False):  # SGLang's loop runs in it, and what it makes cannot be written outside
            while len(self._buffers) < count:
                self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        return self._buffers

    def forget(self) -> None:
        """Somebody may still write into the buffers there are: the next ones are new."""
        self._buffers = []


class ChannelReceiver(Protocol):
    """The engine's end of a channel. One thread at a time calls it, but for `abort`; waits are bounded by their ``watch``.

    On a GPU "the current stream" is the one on which buckets are loaded: what `take` gives may be read in its order, and what it has been
    told to do before `release` is what still reads the bucket. `take` returns once the bucket is there.
    """

    name: str

    def join(self, watch: ReceiveDeadline) -> None:
        """Meets the channel's other members; runs beside generation, on a thread of its own. Raises as `ReceiveDeadline.until`."""
        ...

    def missing(self) -> str:
        """Who has not joined yet, in words."""
        ...

    def manifest(self, push: int, watch: ReceiveDeadline) -> Manifest:
        """What push number ``push`` brings over this channel; its buckets follow. Raises as `join`, and BadMessage."""
        ...

    def take(self, number: int, nbytes: int, watch: ReceiveDeadline) -> Tensor:
        """Bucket ``number``, in order: uint8 [nbytes], valid until its `release`. Raises as `join`."""
        ...

    def release(self, number: int) -> None:
        """The current stream has been told to do all that reads the bucket."""
        ...

    def finish(self, watch: ReceiveDeadline) -> None:
        """Every bucket was released, and all that reads them is done."""
        ...

    def abort(self) -> None:
        """Ends what is under way, from any thread; the wire is of no use afterwards. Returns soon."""
        ...

    def close(self) -> None:
        """Leaves the channel. Returns soon."""
        ...


def _group(channel: WeightChannelAddress, rank: int, ring: BucketRing, device: torch.device) -> ChannelReceiver:
    from services.rollout.engine.receiver.group_receiver import GroupReceiver

    return GroupReceiver(channel, rank, ring, device)


def _memory(channel: WeightChannelAddress, rank: int, ring: BucketRing, device: torch.device) -> ChannelReceiver:
    from services.rollout.engine.receiver.memory_receiver import MemoryReceiver

    return MemoryReceiver(channel, rank, device)


WIRES: dict[str, Callable[[WeightChannelAddress, int, BucketRing, torch.device], ChannelReceiver]] = {"group": _group, "memory": _memory}
"""By kind of channel. ``rank``: this process's in the channel. ``ring``: buffers for those that need their own."""
