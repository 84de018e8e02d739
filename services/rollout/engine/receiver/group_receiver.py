"""The engine's end of a channel over a process group, in which the source is rank 0. Bytes come by broadcast, what they are by the store.

Two broadcasts are on their way while a bucket is being loaded. NCCL's are issued on a stream of their own; each waits, on the GPU, until
the buffer that it fills has been read. No broadcast is ever waited for in a way that could not end: neither backend can call one off.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from services.rollout.engine.receiver.channel_receiver import (
    BUFFERS,
    POLL_INTERVAL_S,
    BucketRing,
    ChannelBroken,
    ReceiveDeadline,
    run_in_thread,
)
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.schema.messages import WeightChannelAddress
from shared.transfer.manifest import Manifest

CONNECT_SECONDS = 5.0
"""Of one attempt to reach a store."""

PULSE_SECONDS = 0.1
"""How often the source's store is asked for a sign of life while buckets are awaited."""

GROUP_SECONDS = 24 * 3600.0
"""NCCL's own limit for a collective, after which it would end the process: far beyond any deadline."""

OVERDUE_SECONDS = 5.0
"""How long after its deadline a broadcast of gloo's ends by itself: only then does what was given up let go of its buffer."""

ABORT_SECONDS = 5.0
"""For NCCL to end a communicator's kernels."""

NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Read when a group is made: no watchdog may end the engine because a peer has died. Deadlines are kept here."""


class GroupReceiver:
    """See `ChannelReceiver`. ``rank``: this process's in the group."""

    def __init__(self, channel: WeightChannelAddress, rank: int, ring: BucketRing, device: torch.device) -> None:
        self.name, self._channel, self._rank, self._ring, self._device = channel.name, channel, rank, ring, device
        self._source = f"the source of channel {channel.name} at {channel.address}:{channel.port}"
        self._store: TCPStore | None = None
        self._group: Any = None
        self._asked: Future[str | None] | None = None
        self._asked_at = 0.0
        self._push = -1
        self._manifest: Manifest | None = None
        self._buffers: list[Tensor] = []
        self._works: dict[int, Any] = {}
        self._arrived: dict[int, torch.cuda.Event] = {}
        self._free: list[torch.cuda.Event | None] = []
        self._posted = 0
        self._deadline = 0.0
        self._broken: str | None = None
        self._waiting_for = self._source
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    # ------------------------------------------------------------------------------------------------------- joining

    def join(self, watch: ReceiveDeadline) -> None:
        store = self._store = self._connected(watch)
        own = PrefixStore(self.name, store)
        own.set(f"here/{self._rank}", "1")
        # whoever has begun to make the group cannot be called back: so nobody begins before all engines are there
        others = [f"here/{rank}" for rank in range(1, self._channel.world_size)]
        self._waiting_for = f"the other engines of channel {self.name}"
        self._watched(watch, lambda: own.check(others), f"the joining of channel {self.name}")
        self._waiting_for = self._source
        made = run_in_thread(lambda: self._made(own, watch.left), f"join-{self.name}")
        made.add_done_callback(self._close_late)
        try:
            watch.until(made.done, f"the joining of channel {self.name}", self._source)
        except MyxoError as error:
            self._broken = str(error)
            raise
        try:
            self._group = made.result()
        except (RuntimeError, ValueError) as error:
            raise ChannelBroken(f"channel {self.name} was not joined: {error}") from error

    def missing(self) -> str:
        return self._waiting_for

    def _connected(self, watch: ReceiveDeadline) -> TCPStore:
        what, last = f"a connection for channel {self.name}", ""
        while True:
            try:
                watch.look(what, self._source)
            except DeadlineExceeded as error:
                raise ChannelBroken(f"{error} ({last})" if last else str(error)) from error
            limit = datetime.timedelta(seconds=max(1.0, min(CONNECT_SECONDS, watch.left)))
            connecting = run_in_thread(lambda limit=limit: self._connection(limit), f"connect-{self.name}")  # type: ignore[misc]
            watch.until(connecting.done, what, self._source)
            failure = connecting.exception()
            if failure is None:
                return connecting.result()
            last = _first_line(failure)
            watch.until(_after(0.2), what, self._source)

    def _connection(self, limit: datetime.timedelta) -> TCPStore:
        channel = self._channel
        return TCPStore(channel.address, channel.port, channel.world_size, is_master=False, timeout=limit, wait_for_workers=False)

    def _made(self, own: PrefixStore, seconds: float) -> Any:
        """The group, once every member is in it. Blocks; raises RuntimeError."""
        backend = self._channel.backend
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend {backend!r}, not 'gloo' or 'nccl'")
        if (backend == "nccl") != (self._stream is not None):
            raise ValueError(f"backend {backend!r} does not carry anything to a model on {self._device}")
        # the same keys as torch's own construction of a group beside the default one, which other members may use
        kind = "cuda" if backend == "nccl" else "cpu"
        store = PrefixStore(f"{kind}/", PrefixStore(f"{self.name}/", own))
        size = self._channel.world_size
        group: Any
        if backend == "gloo":
            group = dist.ProcessGroupGloo(store, self._rank, size, datetime.timedelta(seconds=max(1.0, seconds)))
        else:
            torch.cuda.set_device(self._device)
            with _settings(NCCL_SETTINGS):
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = datetime.timedelta(seconds=GROUP_SECONDS)
                group = dist.ProcessGroupNCCL(store, self._rank, size, options)
        group._set_sequence_number_for_group()
        with self._on_stream():
            first = torch.zeros(1, dtype=torch.uint8, device=self._device)
            group.broadcast([first], self._options(seconds)).wait()
        if self._stream is not None:
            self._stream.synchronize()
        return group

    def _close_late(self, made: Future[Any]) -> None:
        """A group that came into being after this end was given up."""
        if self._broken is not None and made.exception() is None:
            self._end(made.result())

    # ----------------------------------------------------------------------------------------------------- receiving

    def manifest(self, push: int, watch: ReceiveDeadline) -> Manifest:
        self._push = push
        store, key, aborted = self._the_store(), f"manifest/{push}", f"aborted/{push}"

        def look() -> bytes | None:
            if store.check([aborted]):
                raise ChannelBroken(f"{self._source} has given push {push} up: {store.get(aborted).decode(errors='replace')}")
            return store.get(key) if store.check([key]) else None

        found = self._watched(watch, look, f"the manifest of push {push}")
        if found == b"=":
            if self._manifest is None:
                raise BadMessage(f"channel {self.name} repeats a manifest that never came")
        elif found[:1] == b"M":
            self._manifest = Manifest.decode(found[1:])
        else:
            raise BadMessage(f"channel {self.name}: a manifest that begins with {found[:1]!r}")
        buckets = self._manifest.buckets
        self._buffers = self._ring.buffers(max((bucket.nbytes for bucket in buckets), default=0), len(buckets))
        self._free = [None] * len(self._buffers)
        self._works, self._arrived, self._posted, self._deadline = {}, {}, 0, watch.left
        self._asked = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._post(BUFFERS)
        return self._manifest

    def take(self, number: int, nbytes: int, watch: ReceiveDeadline) -> Tensor:
        self._post(number + BUFFERS)
        what = f"bucket {number} of push {self._push}"
        work = self._works[number]
        if self._stream is None:
            watch.until(work.is_completed, what, self._source, self._look)
            try:
                work.wait()
            except RuntimeError as error:
                raise ChannelBroken(f"{what} did not come from {self._source}: {_first_line(error)}") from error
        else:
            arrived = self._arrived.pop(number)
            watch.until(arrived.query, what, self._source, self._look, eager=True)
            torch.cuda.current_stream(self._device).wait_event(arrived)
        del self._works[number]
        return self._buffers[number % len(self._buffers)][:nbytes]

    def release(self, number: int) -> None:
        if self._stream is not None:
            event = self._free[number % len(self._buffers)] or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._free[number % len(self._buffers)] = event

    def finish(self, watch: ReceiveDeadline) -> None:
        pass

    def _post(self, end: int) -> None:
        """Issues the broadcasts of the buckets before number ``end``, whose buffers have been released by then."""
        group = self._group
        if group is None or self._manifest is None:
            raise ChannelBroken(self._broken or f"channel {self.name} was not joined")
        buckets = self._manifest.buckets
        while self._posted < min(end, len(buckets)):
            number = self._posted
            place = number % len(self._buffers)
            flat = self._buffers[place][: buckets[number].nbytes]
            try:
                with self._on_stream():
                    if self._stream is not None and (free := self._free[place]) is not None:
                        self._stream.wait_event(free)
                    work = group.broadcast([flat], self._options(self._deadline + OVERDUE_SECONDS))
                    if self._stream is not None:
                        work.wait()  # of the stream for NCCL's own, not of this thread
                        self._arrived[number] = torch.cuda.Event()
                        self._arrived[number].record(self._stream)
            except RuntimeError as error:
                raise ChannelBroken(
                    f"bucket {number} of push {self._push} cannot come from {self._source}: {_first_line(error)}"
                ) from error
            self._works[number] = work
            self._posted += 1

    def _options(self, seconds: float) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._stream is None:  # NCCL's would end the process
            options.timeout = datetime.timedelta(seconds=seconds)
        return options

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    # ---------------------------------------------------------------------------------------------------- the source

    def _watched(self, watch: ReceiveDeadline, look: Any, what: str) -> Any:
        """What ``look`` finds in the store, asked again until it is something. The store may be silent, so it is asked aside."""
        pause = 0.002
        while True:
            asked = run_in_thread(look, f"ask-{self.name}")
            watch.until(asked.done, what, self._waiting_for, eager=True)
            try:
                found = asked.result()
            except RuntimeError as error:  # torch's errors of stores and connections
                raise ChannelBroken(f"{self._source} is gone: {_first_line(error)}") from error
            if found:
                return found
            watch.until(_after(pause), what, self._waiting_for)
            pause = min(PULSE_SECONDS, pause * 2)

    def _look(self) -> None:
        """Raises WireBroken if the source is gone or has given the push up, as far as the last look at its store knows."""
        if self._broken is not None:
            raise ChannelBroken(self._broken)
        asked = self._asked
        if asked is None:
            if self._asked_at + PULSE_SECONDS < time.monotonic():
                self._asked_at = time.monotonic()
                store, aborted = self._the_store(), f"aborted/{self._push}"
                self._asked = run_in_thread(
                    lambda: store.get(aborted).decode(errors="replace") if store.check([aborted]) else None, f"pulse-{self.name}"
                )
        elif asked.done():
            self._asked = None
            if (error := asked.exception()) is not None:
                raise ChannelBroken(f"{self._source} is gone: {_first_line(error)}") from error
            if (reason := asked.result()) is not None:
                raise ChannelBroken(f"{self._source} has given push {self._push} up: {reason}")

    def _the_store(self) -> TCPStore:
        if self._store is None or self._broken is not None:
            raise ChannelBroken(self._broken or f"channel {self.name} was not joined")
        return self._store

    # ---------------------------------------------------------------------------------------------------- the end

    def abort(self) -> None:
        self._broken = self._broken or f"channel {self.name} was left"
        group, self._group = self._group, None
        if group is not None:
            self._end(group)

    close = abort

    def _end(self, group: Any) -> None:
        """NCCL's kernels are told to end, and waited for; gloo's broadcasts end with their own limit, beside everything."""

        def work() -> None:
            if self._stream is not None:
                torch.cuda.set_device(self._device)
                group.abort()

        ended = run_in_thread(work, f"leave-{self.name}")
        if self._stream is not None:
            # what follows on this device must not meet a broadcast that still writes
            end = time.monotonic() + ABORT_SECONDS
            while time.monotonic() < end and not (ended.done() and self._stream.query()):
                time.sleep(0.001)
        if self._works:
            self._ring.forget()
        # the last reference to a group waits for what it still has to do: let it be this thread's
        threading.Thread(target=_outlive, args=(group, ended), name=f"drop-{self.name}", daemon=True).start()


def _outlive(group: Any, ended: Future[None]) -> None:
    """Holds a group until all others have let go of it, most likely."""
    with contextlib.suppress(Exception):
        ended.result(ABORT_SECONDS)
    time.sleep(POLL_INTERVAL_S)


def _after(seconds: float) -> Any:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _settings(settings: dict[str, str]) -> Iterator[None]:
    """Environment variables that hold in the body."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
