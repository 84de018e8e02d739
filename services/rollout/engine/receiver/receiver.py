"""What a process of the engine does with weights: it joins channels, receives pushes, compares, and knows what it holds.

Invariant: `Receiver.digest` is that of exactly the tensors which the model holds, or empty. What a failed push may have changed is
forgotten; a push of a part keeps what is known of the rest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.rollout.engine.receiver import load_plan
from services.rollout.engine.receiver.channel_receiver import WIRES, Aborted, BucketRing, ChannelReceiver, ReceiveDeadline, run_in_thread
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.schema.messages import WeightChannelAddress
from shared.transfer import digest
from shared.transfer.digest import TensorDigest
from shared.transfer.manifest import Bucket, Manifest, lay_out

log = logging.getLogger(__name__)

KEPT_LAYOUTS = 16
"""Manifests whose plans are kept: a channel's of a whole push, and of a part."""


class ReceiveError(MyxoError):
    """A push that was not received. ``touched``: parameters may hold some of it."""

    def __init__(self, reason: str, touched: bool) -> None:
        self.touched = touched
        super().__init__(reason)


@dataclass(frozen=True)
class Received:
    """A push that was received. ``bytes``: of all buckets. ``differences``: of a check, name → elements that differ."""

    digest: str
    bytes: int
    seconds: float
    differences: dict[str, int]


class Layout:
    """What is kept of a bucket between pushes: how it is loaded and how its leaves lie."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        self.plan: load_plan.LoadPlan | None = None
        self.traced = False
        self.table = digest.leaf_table(bucket)
        if device.type == "cuda":
            self.device_table = torch.from_numpy(self.table).to(device)
            self.leaves = torch.empty(len(self.table), dtype=torch.int64, pin_memory=True)


class Receiver:
    """One rank's receiver. All but `join`, `leave`, `abort` and the properties is for the thread that owns the model.

    Args:
        model: any module with ``load_weights(names and tensors)``. rank: in the engine's tensor parallelism. model_path: the checkpoint
            that adapters are laid over, where there are any.
    """

    def __init__(self, model: Any, rank: int, device: torch.device | str, model_path: str | None = None) -> None:
        self.model, self.rank, self.device, self.model_path = model, rank, torch.device(device), model_path
        self.known: dict[str, TensorDigest] = {}
        self.version = -1
        self.before_change: set[Callable[[str], None]] = set()  # of those who read parameters meanwhile: told why they must stop
        self._digest: str | None = ""
        self._channels: _Channels | None = None
        self._called_off: frozenset[str] = frozenset()  # channels that an abort has left while they were being joined
        self._rings: list[BucketRing] = []
        self._layouts: dict[str, list[Layout]] = {}  # by manifest
        self._parameters: list[int] = []
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    # -------------------------------------------------------------------------------------------------- what it knows

    @property
    def digest(self) -> str:
        """Of all tensors that it knows; empty where it knows none."""
        if self._digest is None:
            self._digest = digest.version_digest(self.known) if self.known else ""
        return self._digest

    def adopt(self, version: int, known: Mapping[str, TensorDigest]) -> None:
        """The model holds exactly these now. None: it is not known what it holds."""
        self.disturb("the weights are being replaced")
        self.known, self.version, self._digest = dict(known), version, None

    def learn(self, version: int, known: Mapping[str, TensorDigest]) -> None:
        """The model holds these now, beside what was known."""
        self.known.update(known)
        self.version, self._digest = version, None

    def disturb(self, reason: str) -> None:
        """Parameters are about to change: whoever reads them stops."""
        for stop in list(self.before_change):
            stop(reason)

    # ---------------------------------------------------------------------------------------------------------- channels

    @property
    def channels(self) -> list[str]:
        """Those that it has joined, or is joining."""
        return [] if self._channels is None else [wire.name for wire in self._channels.wires]

    def join(self, channels: Sequence[WeightChannelAddress], first_rank: int, seconds: float) -> None:
        """Leaves what it was in and joins these, one after the other, on a thread; `receive` waits for it.

        Args:
            first_rank: of the engine's first process, in all channels. seconds: for joining.
        """
        self.leave()
        while len(self._rings) < len(channels):
            self._rings.append(BucketRing(self.device))
        rank = first_rank + self.rank
        wires = [WIRES[channel.kind](channel, rank, ring, self.device) for channel, ring in zip(channels, self._rings, strict=False)]
        self._channels = _Channels(wires, ReceiveDeadline(seconds, "the channels are given up"))

    def leave(self) -> None:
        """Leaves all channels."""
        channels, self._channels = self._channels, None
        if channels is not None:
            channels.abort()
        self.drop_views()

    def abort(self) -> None:
        """Leaves channels that are still being joined. A push on its way in is ended by its own watch."""
        if self._channels is not None and not self._channels.joined:
            self._called_off = frozenset(self.channels)
            self.leave()

    def drop_views(self) -> None:
        """Lets go of all flat buffers, which may not be there any more."""
        for layouts in list(self._layouts.values()):
            for layout in layouts:
                if layout.plan is not None:
                    layout.plan.forget()

    # ------------------------------------------------------------------------------------------------------ receiving

    def receive(self, version: int, push: int, channels: Sequence[str], watch: ReceiveDeadline, *, check: bool = False) -> Received:
        """Takes one push from these channels and loads it, or compares it with what the model holds.

        Channels that a push has failed on are left: what is on its way over them belongs to nobody.

        Raises:
            ReceiveError: whatever went wrong.
        """
        intake = _Intake(self, version, push, check, watch)
        if not check:
            self.disturb(f"a push of version {version} begins")
        try:
            return intake.run(self._joined(channels, watch))
        except Exception as error:
            if not isinstance(error, MyxoError):
                log.exception("push %d of version %d was not received", push, version)
            if intake.touched:
                self.adopt(-1, {})
            self.leave()
            self.settle()
            reason = str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}"
            raise ReceiveError(reason, intake.touched) from error

    def _joined(self, names: Sequence[str], watch: ReceiveDeadline) -> list[ChannelReceiver]:
        channels = self._channels
        if channels is None and self._called_off.issuperset(names):  # the order was on its way when its abort came
            raise Aborted(f"the joining of channels {sorted(names)} was called off")
        if channels is None or set(names) - set(self.channels):
            raise BadMessage(f"channels {sorted(names)} are to be received from; this engine has joined {self.channels or 'none'}")
        channels.wait(watch)
        return [wire for wire in channels.wires if wire.name in names]

    def layouts(self, manifest: Manifest) -> list[Layout]:
        """What is kept of the manifest's buckets."""
        parameters = [tensor.data_ptr() for tensor in load_plan.parameters_of(self.model)]
        if parameters != self._parameters:  # replaced since: what was traced leads elsewhere
            self._layouts, self._parameters = {}, parameters
        found = self._layouts.pop(manifest.id, None)
        if found is None:
            found = [Layout(bucket, self.device) for bucket in manifest.buckets]
            while len(self._layouts) >= KEPT_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
        self._layouts[manifest.id] = found
        return found

    def load(self, layout: Layout, flat: Tensor) -> None:
        """Loads one bucket, in the current stream's order."""
        if not layout.traced:
            layout.plan, obstacle = load_plan.trace(self.model, layout.bucket, flat)
            layout.traced = True
            if layout.plan is None:
                first = layout.bucket.slots[0].name
                log.info("the bucket that begins with %s will always be loaded by the model itself: %s", first, obstacle)
        elif layout.plan is not None:
            layout.plan.replay(flat)
        else:
            with torch.no_grad():
                self.model.load_weights(load_plan.views(layout.bucket, flat))

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Loading's own stream, on a GPU; it begins once all that the device was told before is done."""
        if self._stream is None:
            yield
        else:
            torch.cuda.synchronize(self.device)  # once per push: the engine's last step may be under way on any stream
            with torch.cuda.stream(self._stream):
                yield

    def settle(self, seconds: float = 5.0) -> None:
        """Waits until nothing that was told to loading's stream is under way."""
        end = time.monotonic() + seconds
        while self._stream is not None and not self._stream.query() and time.monotonic() < end:
            time.sleep(0.001)


class _Channels:
    """Wires that are being joined, one after the other, in the same order on all engines: NCCL's communicators are made alike."""

    def __init__(self, wires: list[ChannelReceiver], watch: ReceiveDeadline) -> None:
        self.wires, self._watch = wires, watch
        self._ended = threading.Event()
        self._present: ChannelReceiver | None = None
        self._joining = run_in_thread(self._join, "join-channels")

    @property
    def joined(self) -> bool:
        """Whether joining has ended well."""
        return self._joining.done() and self._joining.exception() is None

    def wait(self, watch: ReceiveDeadline) -> None:
        """Returns once all are joined. Raises what joining did, or Aborted, or DeadlineExceeded that names who is missing."""
        try:
            watch.until(self._joining.done, "the channels' joining", "the channels' members")
        except DeadlineExceeded as error:
            present = self._present or self.wires[0]
            raise DeadlineExceeded(f"the joining of channel {present.name}", present.missing(), error.seconds, error.next_action) from None
        self._joining.result()

    def abort(self) -> None:
        self._ended.set()
        self._watch.abort()
        for wire in self.wires:
            wire.abort()
            wire.close()

    def _join(self) -> None:
        for wire in self.wires:
            self._present = wire
            wire.join(self._watch)
            if self._ended.is_set():
                wire.abort()
                wire.close()


class _Intake:
    """One push on its way in."""

    def __init__(self, receiver: Receiver, version: int, push: int, check: bool, watch: ReceiveDeadline) -> None:
        self._receiver, self._version, self._push, self._check, self._watch = receiver, version, push, check, watch
        self.touched = False
        self._found: dict[str, TensorDigest] = {}
        self._hashing: deque[tuple[Layout, torch.cuda.Event]] = deque()
        self._differences: dict[str, int | Tensor] = {}
        self._adapters: list[tuple[Manifest, dict[str, Tensor]]] = []

    def run(self, wires: Sequence[ChannelReceiver]) -> Received:
        receiver, started = self._receiver, time.monotonic()
        with receiver.on_stream():  # before any broadcast is issued: beginning waits for the device, and a broadcast may never end
            manifests = [wire.manifest(self._push, self._watch) for wire in wires]
            self._take_all(wires, manifests)
            for manifest, tensors in self._adapters:
                self._merge(manifest, tensors)
            self._drain(wires)
        differences = {name: int(count) for name, count in self._differences.items()}
        if not self._check and self._adapters:  # over its own checkpoint, whatever it held before: they are all that there is to know
            receiver.adopt(self._version, self._found)
        elif not self._check:
            receiver.learn(self._version, self._found)
        elif not any(differences.values()):
            receiver.learn(receiver.version, self._found)
        size = sum(bucket.nbytes for manifest in manifests for bucket in manifest.buckets)
        seconds = time.monotonic() - started
        named = digest.version_digest(receiver.known | self._found) if self._check else receiver.digest
        return Received(named, size, seconds, {name: count for name, count in differences.items() if count})

    def _take_all(self, wires: Sequence[ChannelReceiver], manifests: Sequence[Manifest]) -> None:
        """Every channel's buckets in turn: the same order on all engines. Nothing is loaded before every channel has brought one."""
        receiver = self._receiver
        layouts = [receiver.layouts(manifest) for manifest in manifests]
        flats = [
            wire.take(0, manifest.buckets[0].nbytes, self._watch) if manifest.buckets else None
            for wire, manifest in zip(wires, manifests, strict=True)
        ]
        adapters: list[dict[str, Tensor]] = [{} for _ in wires]
        for number in range(max((len(manifest.buckets) for manifest in manifests), default=0)):
            for channel, (wire, manifest) in enumerate(zip(wires, manifests, strict=True)):
                if number >= len(manifest.buckets):
                    continue
                layout, flat = layouts[channel][number], flats[channel]
                if flat is None:
                    flat = wire.take(number, layout.bucket.nbytes, self._watch)
                flats[channel] = None
                if manifest.kind == "adapter":
                    adapters[channel] |= {name: tensor.clone() for name, tensor in load_plan.views(layout.bucket, flat)}
                else:
                    self._load(layout, flat)
                self._hash(layout, flat)
                wire.release(number)
                self._gather()
        self._adapters = [(manifest, held) for manifest, held in zip(manifests, adapters, strict=True) if held]

    def _load(self, layout: Layout, flat: Tensor) -> None:
        if self._check:
            for name, count in load_plan.compare(self._receiver.model, layout.bucket, flat).items():
                self._differences[name] = self._differences.get(name, 0) + count
        else:
            self.touched = True
            self._receiver.load(layout, flat)

    def _merge(self, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        """Lays an adapter over the base weights."""
        from services.rollout.engine.receiver.lora_adapter import merged

        receiver = self._receiver
        if receiver.model_path is None:
            raise BadMessage("an adapter came, but the engine's checkpoint, over which it is to be laid, is not known")
        made = merged(manifest, tensors, Path(receiver.model_path))
        if self._check:
            for name, tensor in made:
                bucket = lay_out([(name, "float32", tuple(tensor.shape))], tensor.nbytes).buckets[0]
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                self._differences |= load_plan.compare(receiver.model, bucket, flat)
            return
        self.touched = True
        with torch.no_grad():
            receiver.model.load_weights(made)

    def _hash(self, layout: Layout, flat: Tensor) -> None:
        if self._receiver.device.type == "cuda":
            from shared.transfer import digest_kernel

            layout.leaves.copy_(digest_kernel.leaves(flat, layout.device_table), non_blocking=True)
            hashed = torch.cuda.Event()
            hashed.record()
            self._hashing.append((layout, hashed))
        else:
            self._found |= digest.tensors(layout.bucket, digest.leaves(flat.numpy(), layout.table))

    def _gather(self) -> None:
        """Digests of buckets whose leaves the device has hashed by now."""
        while self._hashing and self._hashing[0][1].query():
            layout, _ = self._hashing.popleft()
            self._found |= digest.tensors(layout.bucket, layout.leaves.numpy().view(np.uint64))

    def _drain(self, wires: Sequence[ChannelReceiver]) -> None:
        """Waits until the device has done all that it was told."""
        if self._receiver.device.type == "cuda":
            told = torch.cuda.Event()
            told.record()

            what = f"the end of loading push {self._push}"
            self._watch.until(told.query, what, "this engine's device", self._gather, eager=True)
            self._gather()
        for wire in wires:
            wire.finish(self._watch)


Verb = Callable[["Receiver", Mapping[str, Any], ReceiveDeadline], dict[str, Any]]
"""What an order has done: the receiver, the order, how long it may take → the answer's fields. Raises MyxoError."""
