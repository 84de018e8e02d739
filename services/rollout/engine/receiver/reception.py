"""One push, as a process of the engine receives it: begun on any thread, loaded on the model's.

Beginning reads what the push brings and issues the first broadcasts, into buffers that nothing else uses: it may go on while the engine
generates, and the transfer with it. Nothing of the model is touched before `Reception.run`, which loads bucket after bucket.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from services.rollout.engine.receiver import load_plan
from services.rollout.engine.receiver.lora_adapter import merged
from shared.runtime.errors import BadMessage, MyxoError
from shared.transfer.bucket_ring import ManifestHasher, bucket_views
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.manifest import Manifest, lay_out
from shared.transfer.weight_channel import ChannelReceiver, TransferDeadline

PEER_DONE = "done"
"""The store's key in a transfer between engines: the number of readers that have received everything."""


class HeldWeights(Protocol):
    """What a push is received into: `services.rollout.engine.receiver.receiver.Receiver`."""

    model: Any
    model_path: str | None
    device: torch.device
    known: dict[str, TensorDigest]
    version: int

    @property
    def digest(self) -> str: ...

    def on_stream(self) -> contextlib.AbstractContextManager[None]: ...

    def layout(self, manifest: Manifest) -> "ManifestLayout": ...

    def adopt(self, version: int, known: Mapping[str, TensorDigest]) -> None: ...

    def learn(self, version: int, known: Mapping[str, TensorDigest]) -> None: ...


class ManifestLayout:
    """The plans of a manifest, kept between pushes, by which its buckets are loaded and hashed."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest = manifest
        self.loaders = [load_plan.BucketLoader(bucket) for bucket in manifest.buckets]
        self.hasher = ManifestHasher(manifest, device)


@dataclass
class _Stream:
    """One channel's part of a push; with ``others``, which bring parts of the same tensors, all of it."""

    channel: ChannelReceiver
    layout: ManifestLayout
    adapter: dict[str, Tensor] = field(default_factory=dict)
    others: Sequence[ChannelReceiver] = ()


class Reception:
    """A push that is being received.

    Args:
        push: its number. check: compare with the model's weights, load nothing. channels: that it comes over. manifests: channel → the id
            of its manifest, where the push's request names it.

    Attributes:
        touched: whether parameters may hold some of it. marks: what was reached → when, seconds of this machine's monotonic clock.
    """

    def __init__(
        self,
        receiver: HeldWeights,
        version: int,
        push: int,
        check: bool,
        channels: Sequence[ChannelReceiver],
        deadline: TransferDeadline,
        manifests: Mapping[str, str],
    ) -> None:
        self.channels, self.version, self.push, self.check = channels, version, push, check
        self._receiver, self._deadline, self._named = receiver, deadline, manifests
        self.touched = False
        self.marks: dict[str, float] = {}
        self._manifests: list[Manifest] = []
        self._streams: list[_Stream] = []
        self._differences: dict[str, int | Tensor] = {}

    @property
    def begun(self) -> bool:
        """Returns whether broadcasts may be on their way."""
        return bool(self._manifests)

    def begin(self) -> None:
        """Reads the manifests and issues the channels' first broadcasts. Raises as a channel's methods do."""
        for channel in self.channels:
            self._manifests.append(channel.manifest(self.push, self._deadline, self._named.get(channel.name, "")))
        self.marks["begun"] = max((channel.begun_at for channel in self.channels), default=0.0) or time.monotonic()

    def mark(self, what: str) -> None:
        """Notes that something has been reached now, unless it was before."""
        self.marks.setdefault(what, time.monotonic())

    def run(self) -> dict[str, Any]:
        """Loads, or compares, the whole push. Returns the fields of `shared.schema.weight_messages.WeightsReceived`."""
        started, receiver = time.monotonic(), self._receiver
        self.mark("scheduler")
        with receiver.on_stream():
            if not self.begun:
                self.begin()
            channels, manifests = self.channels, self._manifests
            if self._from_peer(manifests):
                self._streams = [_Stream(channels[0], receiver.layout(manifests[0]), others=channels[1:])]
            else:
                self._streams = [_Stream(channel, receiver.layout(manifest)) for channel, manifest in zip(channels, manifests, strict=True)]
            self._take_all()
            self.mark("arrived")
            for stream in self._streams:
                self._merge(stream)
            self._drain()
        self.mark("loaded")
        seconds = time.monotonic() - started
        differences = {name: int(count) for name, count in self._differences.items() if int(count)}
        nbytes, whole = sum(manifest.nbytes for manifest in manifests), self._from_peer(manifests)
        for channel in channels if whole else ():
            with contextlib.suppress(RuntimeError, MyxoError):  # the source need not wait any longer; it would only wait for a limited time
                channel.store.add(PEER_DONE, 1)
        digest = self._learn(differences, whole)
        self.mark("checked")
        return {"digest": digest, "bytes": nbytes, "seconds": seconds, "differences": differences, "marks": self.marks}

    def report_held(self, digest: str) -> None:
        """Tells the trainer's first rank at once which digest the weights have: the answer to the command has a longer way."""
        if not self.check and not self._from_peer(self._manifests):
            with contextlib.suppress(MyxoError):  # the trainer waits for the answer then
                self.channels[0].report_held(self.push, digest)

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
        if not self.check and (whole or any(stream.adapter for stream in self._streams)):
            receiver.adopt(self.version, found)  # adapters are merged into the engine's own checkpoint: their digests are complete
        elif not self.check:
            receiver.learn(self.version, found)
        elif not differences:
            receiver.learn(receiver.version, found)
        return version_digest(receiver.known | found) if self.check else receiver.digest

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
        self.mark("first_bucket")
        return flat

    def _load(self, stream: _Stream, index: int, flat: Tensor) -> None:
        bucket = stream.layout.manifest.buckets[index]
        if stream.layout.manifest.kind == "adapter":
            stream.adapter |= {name: tensor.clone() for name, tensor in bucket_views(bucket, flat)}
        elif self.check:
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
        if self.check:
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
            self._deadline.until(last.query, f"the end of loading push {self.push}", "this engine's device", self._poll, eager=True)
        for stream in self._streams:
            for channel in (stream.channel, *stream.others):
                channel.finish(self._deadline)

    def _poll(self) -> None:
        for stream in self._streams:
            stream.layout.hasher.poll()
