"""Handles weights in one process of the engine: it joins channels, receives pushes, compares, and records which tensors it holds.

Invariant: `Receiver.digest` is that of exactly the tensors that the model holds, or empty. Digests that a failed push may have made invalid
are forgotten; a push of a part keeps the digests of the rest.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.rollout.engine.receiver import load_plan
from services.rollout.engine.receiver.lora_adapter import merged
from shared.runtime.daemon_thread import run_in_thread
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.bucket_hashing import ManifestHasher
from shared.transfer.bucket_ring import BucketRing, bucket_views
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.group_channel import GroupReceiver
from shared.transfer.manifest import Manifest, lay_out
from shared.transfer.memory_channel import MemoryReceiver
from shared.transfer.weight_channel import ChannelReceiver, TransferAborted, TransferDeadline

log = logging.getLogger(__name__)

KEPT_LAYOUTS = 16
"""The number of manifests whose plans are kept: for each channel that of a whole push, and that of a part."""

PEER_DONE = "done"
"""The store's key in a transfer between engines: the number of readers that have received everything."""


class ReceiveError(MyxoError):
    """A push was not received. ``touched``: parameters may hold some of it."""

    def __init__(self, reason: str, touched: bool) -> None:
        self.touched = touched
        super().__init__(reason)


def said_by(error: BaseException) -> str:
    """Returns what an error says, with its kind unless it is one of ours."""
    return str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}"


class ManifestLayout:
    """The plans of a manifest, kept between pushes, by which its buckets are loaded and hashed."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest = manifest
        self.loaders = [load_plan.BucketLoader(bucket) for bucket in manifest.buckets]
        self.hasher = ManifestHasher(manifest, device)


class Receiver:
    """The receiver of one rank. Only `join`, `leave`, `abort` and the properties may be used by other threads than the model's.

    Args:
        model: any module with ``load_weights(names and tensors)``. rank: in the engine's tensor parallelism. model_path: the checkpoint
            that adapters are laid over, where there are any.
    """

    def __init__(self, model: Any, rank: int, device: torch.device | str, model_path: str | None = None) -> None:
        self.model, self.rank, self.device, self.model_path = model, rank, torch.device(device), model_path
        self.known: dict[str, TensorDigest] = {}
        self.version = -1
        self.before_change: set[Callable[[str], None]] = set()  # callbacks of threads that read parameters; called with the reason to stop
        self._digest: str | None = ""
        self._channels: _JoinedChannels | None = None
        self._called_off: frozenset[str] = frozenset()  # channels that were left by an abort while they were being joined
        self._rings: list[BucketRing] = []
        self._layouts: dict[str, ManifestLayout] = {}  # by manifest
        self._parameters: list[int] = []
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    # ------------------------------------------------------------------------------------------------ held weights

    @property
    def digest(self) -> str:
        """Returns the digest of all known tensors; empty where none is known."""
        if self._digest is None:
            self._digest = version_digest(self.known) if self.known else ""
        return self._digest

    def adopt(self, version: int, known: Mapping[str, TensorDigest]) -> None:
        """Notes that the model now holds exactly these tensors. None: its tensors are unknown."""
        self.disturb("the weights are being replaced")
        self.known, self.version, self._digest = dict(known), version, None

    def learn(self, version: int, known: Mapping[str, TensorDigest]) -> None:
        """Notes that the model now holds these tensors, in addition to those already known."""
        self.known.update(known)
        self.version, self._digest = version, None

    def disturb(self, reason: str) -> None:
        """Stops all readers of parameters, because these are about to change."""
        for stop in list(self.before_change):
            stop(reason)

    # ------------------------------------------------------------------------------------------------------- channels

    @property
    def channels(self) -> list[str]:
        """Returns the channels that it has joined, or is joining."""
        return [] if self._channels is None else [channel.name for channel in self._channels.all]

    def join(self, addresses: Sequence[WeightChannelAddress], first_rank: int, seconds: float) -> None:
        """Leaves its present channels and joins these on a thread; `receive` waits for it.

        Args:
            first_rank: of the engine's first process, in all channels. seconds: for joining.
        """
        self.leave()
        while len(self._rings) < len(addresses):
            self._rings.append(BucketRing(self.device))
        rank = first_rank + self.rank
        channels: list[ChannelReceiver] = [
            MemoryReceiver(address, rank, self.device) if address.kind == "memory" else GroupReceiver(address, rank, self.device, ring)
            for address, ring in zip(addresses, self._rings, strict=False)
        ]
        self._channels = _JoinedChannels(channels, TransferDeadline(seconds, "the channels are given up"))

    def leave(self, *, free: bool = False) -> None:
        """Leaves all channels. ``free``: also gives up the buffers that the next ones would take over."""
        channels, self._channels = self._channels, None
        if free:
            self._rings = []
        if channels is not None:
            channels.leave()
        for layout in list(self._layouts.values()):
            for loader in layout.loaders:
                loader.forget()

    def abort(self) -> None:
        """Leaves channels that are still being joined. A push that is being received is ended by its own deadline."""
        if self._channels is not None and not self._channels.joined:
            self._called_off = frozenset(self.channels)
            self.leave()

    # ------------------------------------------------------------------------------------------------------ receiving

    def receive(
        self, version: int, push: int, channels: Sequence[str], deadline: TransferDeadline, *, check: bool = False
    ) -> dict[str, Any]:
        """Receives one push from these channels and loads it, or compares it with the model's weights.

        Channels on which a push has failed are left, since data of the failed push may still be in transit over them. Returns the fields of
        `shared.schema.messages.WeightsReceived`.

        Raises:
            ReceiveError: for every failure.
        """
        reception = _Reception(self, version, push, check, deadline)
        if not check:
            self.disturb(f"a push of version {version} begins")
        try:
            return reception.run(self._joined(channels, deadline))
        except Exception as error:
            if not isinstance(error, MyxoError):
                log.exception("push %d of version %d was not received", push, version)
            if reception.touched:
                self.adopt(-1, {})
            self.leave()
            self._settle()
            raise ReceiveError(said_by(error), reception.touched) from error

    def _joined(self, names: Sequence[str], deadline: TransferDeadline) -> list[ChannelReceiver]:
        channels = self._channels
        if channels is None and self._called_off.issuperset(names):  # the abort came before its command
            raise TransferAborted(f"the joining of channels {sorted(names)} was called off")
        if channels is None or set(names) - set(self.channels):
            raise BadMessage(f"channels {sorted(names)} are to be received from; this engine has joined {self.channels or 'none'}")
        channels.wait(deadline)
        return [channel for channel in channels.all if channel.name in names]

    def layout(self, manifest: Manifest) -> ManifestLayout:
        """Returns the kept layout of a manifest."""
        parameters = [tensor.data_ptr() for tensor in load_plan.parameters_of(self.model)]
        if parameters != self._parameters:  # a parameter was replaced since, so the traced copies would go elsewhere
            self._layouts, self._parameters = {}, parameters
        found = self._layouts.pop(manifest.id, None) or ManifestLayout(manifest, self.device)
        while len(self._layouts) >= KEPT_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[manifest.id] = found
        return found

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes the loading stream the current one on a GPU; it starts after all work that was submitted to the device before."""
        if self._stream is None:
            yield
        else:
            torch.cuda.synchronize(self.device)  # once per push: the engine's last step may be under way on any stream
            with torch.cuda.stream(self._stream):
                yield

    def _settle(self, seconds: float = 5.0) -> None:
        """Waits until the loading stream has done all of its work."""
        end = time.monotonic() + seconds
        while self._stream is not None and not self._stream.query() and time.monotonic() < end:
            time.sleep(0.001)


class _JoinedChannels:
    """The channels that are being joined, one after the other and in the same order on all engines, as NCCL's communicators require."""

    def __init__(self, channels: list[ChannelReceiver], deadline: TransferDeadline) -> None:
        self.all, self._deadline = channels, deadline
        self._present = channels[0]
        self._joining = run_in_thread(self._join, "join-channels")

    @property
    def joined(self) -> bool:
        """Returns whether all channels have been joined."""
        return self._joining.done() and self._joining.exception() is None

    def wait(self, deadline: TransferDeadline) -> None:
        """Returns once all are joined. Raises the error of joining, TransferAborted, or DeadlineExceeded that names the missing members."""
        members = "the channels' members"
        try:
            deadline.until(self._joining.done, "the channels' joining", members)
            if not self.joined:
                deadline.check("the channels' joining", members)  # an abort also leaves the channels, and is the reason then
        except DeadlineExceeded:
            present = self._present
            what = f"the joining of channel {present.name}"
            raise DeadlineExceeded(what, present.awaited_from, deadline.seconds, deadline.next_action) from None
        self._joining.result()

    def leave(self) -> None:
        self._deadline.abort()
        for channel in self.all:
            channel.close()

    def _join(self) -> None:
        for channel in self.all:
            self._present = channel
            channel.join(self._deadline)


@dataclass
class _Stream:
    """One channel's part of a push; with ``others``, which bring parts of the same tensors, all of it."""

    channel: ChannelReceiver
    layout: ManifestLayout
    adapter: dict[str, Tensor] = field(default_factory=dict)
    others: Sequence[ChannelReceiver] = ()


class _Reception:
    """A push that is being received."""

    def __init__(self, receiver: Receiver, version: int, push: int, check: bool, deadline: TransferDeadline) -> None:
        self._receiver, self._version, self._push, self._check, self._deadline = receiver, version, push, check, deadline
        self.touched = False
        self._streams: list[_Stream] = []
        self._differences: dict[str, int | Tensor] = {}

    def run(self, channels: Sequence[ChannelReceiver]) -> dict[str, Any]:
        started, receiver = time.monotonic(), self._receiver
        with receiver.on_stream():  # before any broadcast is issued: beginning waits for the device, and a broadcast may never end
            manifests = [channel.manifest(self._push, self._deadline) for channel in channels]
            if self._from_peer(manifests):
                self._streams = [_Stream(channels[0], receiver.layout(manifests[0]), others=channels[1:])]
            else:
                self._streams = [_Stream(channel, receiver.layout(manifest)) for channel, manifest in zip(channels, manifests, strict=True)]
            self._take_all()
            for stream in self._streams:
                self._merge(stream)
            self._drain()
        seconds = time.monotonic() - started
        differences = {name: int(count) for name, count in self._differences.items() if int(count)}
        nbytes, whole = sum(manifest.nbytes for manifest in manifests), self._from_peer(manifests)
        for channel in channels if whole else ():
            with contextlib.suppress(RuntimeError, MyxoError):  # the source need not wait any longer; it would only wait for a limited time
                channel.store.add(PEER_DONE, 1)
        return {"digest": self._learn(differences, whole), "bytes": nbytes, "seconds": seconds, "differences": differences}

    def _from_peer(self, manifests: Sequence[Manifest]) -> bool:
        """Returns whether the channels are those of another engine's ranks. Raises BadMessage where these do not fit together."""
        if all(manifest.kind != "partial" for manifest in manifests):
            return False
        if any(manifest.id != manifests[0].id for manifest in manifests):
            raise BadMessage("the ranks of the source send different tensors")
        return True

    def _learn(self, differences: dict[str, int], whole: bool) -> str:
        """Records the tensors that the model holds now; ``whole``: no others. Returns the version's digest, of what has come."""
        receiver = self._receiver
        found = {name: known for stream in self._streams for name, known in stream.layout.hasher.digests().items()}
        if not self._check and (whole or any(stream.adapter for stream in self._streams)):
            receiver.adopt(self._version, found)  # adapters are merged into the engine's own checkpoint: their digests are complete
        elif not self._check:
            receiver.learn(self._version, found)
        elif not differences:
            receiver.learn(receiver.version, found)
        return version_digest(receiver.known | found) if self._check else receiver.digest

    def _take_all(self) -> None:
        """Receives the channels' buckets in turn, in the same order on all engines. Loading begins once every channel has brought one."""
        held = [stream for stream in self._streams if stream.layout.manifest.buckets]
        for stream in self._streams:
            stream.layout.hasher.begin()
        first = [self._taken(stream, 0) for stream in held]
        for stream, flat in zip(held, first, strict=True):
            self._load(stream, 0, flat)
        for index in range(1, max((len(stream.layout.manifest.buckets) for stream in held), default=0)):
            for stream in held:
                if index < len(stream.layout.manifest.buckets):
                    self._load(stream, index, self._taken(stream, index))

    def _taken(self, stream: _Stream, index: int) -> Tensor:
        nbytes = stream.layout.manifest.buckets[index].nbytes
        flat = stream.channel.take(index, nbytes, self._deadline)
        for other in stream.others:  # an element that several ranks hold is the same in all of them, or no digest will fit
            flat.bitwise_or_(other.take(index, nbytes, self._deadline))
            other.release(index)
        return flat

    def _load(self, stream: _Stream, index: int, flat: Tensor) -> None:
        bucket = stream.layout.manifest.buckets[index]
        if stream.layout.manifest.kind == "adapter":
            stream.adapter |= {name: tensor.clone() for name, tensor in bucket_views(bucket, flat)}
        elif self._check:
            for name, count in load_plan.compare(self._receiver.model, bucket, flat).items():
                self._differences[name] = self._differences.get(name, 0) + count
        else:
            self.touched = True
            stream.layout.loaders[index].load(self._receiver.model, flat)
        stream.layout.hasher.take(index, flat)
        stream.channel.release(index)
        self._poll()

    def _merge(self, stream: _Stream) -> None:
        """Merges a channel's adapter into the base weights."""
        receiver = self._receiver
        if not stream.adapter:
            return
        if receiver.model_path is None:
            raise BadMessage("an adapter came, but the engine's checkpoint, over which it is to be laid, is not known")
        made = merged(stream.layout.manifest, stream.adapter, Path(receiver.model_path))
        if self._check:
            for name, tensor in made:
                bucket = lay_out([(name, "float32", tuple(tensor.shape))], tensor.nbytes).buckets[0]
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                self._differences |= load_plan.compare(receiver.model, bucket, flat)
            return
        self.touched = True
        with torch.no_grad():
            receiver.model.load_weights(made)

    def _drain(self) -> None:
        """Waits until the device has done all submitted work."""
        if self._receiver.device.type == "cuda":
            last = torch.cuda.Event()
            last.record()
            self._deadline.until(last.query, f"the end of loading push {self._push}", "this engine's device", self._poll, eager=True)
        for stream in self._streams:
            for channel in (stream.channel, *stream.others):
                channel.finish(self._deadline)

    def _poll(self) -> None:
        for stream in self._streams:
            stream.layout.hasher.poll()
