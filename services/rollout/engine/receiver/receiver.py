"""Handles weights in one process of the engine: joins channels, receives pushes, compares, and records which tensors it holds.

Invariant: `Receiver.digest` is that of exactly the tensors that the model holds, or empty. Digests that a failed push may have made invalid
are forgotten; a push of a part keeps the digests of the rest.

A push (`Reception`) is begun on any thread and loaded on the model's. Beginning reads what the push brings and issues the first broadcasts,
into buffers that nothing else uses: it may run while the engine generates, and the transfer with it. Nothing of the model is touched before
`Reception.run`, which loads bucket after bucket. An adapter is merged into the engine's own checkpoint, which is read from disk at every
push, mapped and not copied, so that the engine holds no second copy and rounding errors do not accumulate.
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

from services.rollout.engine import quantized_layers
from services.rollout.engine.receiver import load_plan
from shared.model.hf_checkpoint import weight_files
from shared.runtime.errors import BadMessage, ConfigError, DeadlineExceeded, MyxoError
from shared.runtime.tasks import run_in_thread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.bucket_ring import BucketRing, ManifestHasher, bucket_views, torch_dtype
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.group_channel import GroupReceiver
from shared.transfer.manifest import Manifest, lay_out, loaded_together
from shared.transfer.memory_channel import MemoryReceiver
from shared.transfer.tensor_file import TensorFileBroken, TensorFiles
from shared.transfer.weight_channel import ChannelReceiver, TransferAborted, TransferDeadline

FIELD = "model.hf_checkpoint"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def merged(manifest: Manifest, tensors: Mapping[str, Tensor], model_path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the adapted matrices under their Hugging Face names, one at a time, for ``model.load_weights``: W + scale * B A, float32.

    ``manifest``: of kind ``adapter``, with the scale. ``tensors``: by PEFT's names, on the device where the products are to be computed.
    ``model_path``: the engine's checkpoint. Raises BadMessage: an adapter is incomplete or does not fit its matrix. ConfigError: the
    checkpoint lacks that matrix, or cannot be read. Both are raised before the first matrix is yielded."""
    matrices = _matrices(manifest)
    try:
        base = TensorFiles(weight_files(model_path)[0], links=True)
    except TensorFileBroken as error:
        raise ConfigError(FIELD, str(model_path), f"readable safetensors: {error}") from error
    for name, (a, b) in matrices.items():
        if name not in base.tensors:
            raise ConfigError(FIELD, str(model_path), f"a checkpoint with {name}, for which there is an adapter")
        shape, wanted = base.tensors[name][1], (tensors[b].size(0), tensors[a].size(1))
        if shape != wanted or tensors[a].size(0) != tensors[b].size(1):
            raise BadMessage(f"adapter {a} {tuple(tensors[a].shape)} and {b} {tuple(tensors[b].shape)} for {name} of shape {shape}")
    for name, (a, b) in matrices.items():
        dtype, shape = base.tensors[name]
        weight = torch.from_numpy(base[name]).view(torch_dtype(dtype)).view(shape)
        weight = weight.to(tensors[a].device).float()  # in this order, half as many bytes are copied to a GPU
        yield name, torch.addmm(weight, tensors[b].float(), tensors[a].float(), alpha=manifest.scale)


def _matrices(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Returns the Hugging Face name of each adapted matrix → PEFT's names of its A and B."""
    held = [slot.name for slot in manifest.slots()]
    names: dict[str, tuple[str, str]] = {}
    for name in held:
        stem = name.removesuffix(_A).removesuffix(_B)
        if not name.startswith(_PREFIX) or stem == name:
            raise BadMessage(f"{name!r} in the manifest of an adapter: no name of PEFT's")
        names[f"{stem.removeprefix(_PREFIX)}.weight"] = stem + _A, stem + _B
    missing = sorted({part for pair in names.values() for part in pair} - set(held))
    if missing:
        raise BadMessage(f"the manifest of an adapter lacks {missing[0]}")
    return names


PEER_DONE = "done"  # the store's key in a transfer between engines: the number of readers that have received everything


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

    ``push``: its number. ``check``: compare with the model's weights, load nothing. ``channels``: that it comes over. ``manifests``:
    channel → the id of its manifest, where the push's request names it. Attributes: ``touched``: whether parameters may hold some of it.
    ``marks``: what was reached → when, seconds of this machine's monotonic clock."""

    def __init__(
        self,
        receiver: "Receiver",
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
        self._deadline.check("its turn", "the engine")
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
            if self.touched:
                quantized_layers.refresh()
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
        """Reports to the trainer's first rank at once which digest the weights have: the answer to the command has a longer way."""
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
        receiver = self._receiver
        if not stream.adapter:
            return
        if receiver.model_path is None:
            raise BadMessage("an adapter came, but the engine's checkpoint, over which it is to be laid, is not known")
        made = merged(stream.layout.manifest, stream.adapter, Path(receiver.model_path))
        if self.check:
            for unit in map(dict, loaded_together(made, lambda one: one[0])):
                (bucket,) = lay_out([(name, "float32", tuple(tensor.shape)) for name, tensor in unit.items()], 0).buckets
                flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=receiver.device)
                for name, view in bucket_views(bucket, flat):
                    view.copy_(unit[name])
                self._differences |= load_plan.compare(receiver.model, bucket, flat)
            return
        self.touched = True
        with torch.no_grad():
            receiver.model.load_weights(made)

    def _drain(self) -> None:
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


log = logging.getLogger(__name__)

KEPT_LAYOUTS = 16  # the number of manifests whose plans are kept: for each channel that of a whole push, and that of a part


class ReceiveError(MyxoError):
    """A push was not received. ``touched``: parameters may hold some of it."""

    def __init__(self, reason: str, touched: bool) -> None:
        self.touched = touched
        super().__init__(reason)


def said_by(error: BaseException) -> str:
    """Returns what an error says, with its kind unless it is one of ours."""
    return str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}"


class Receiver:
    """The receiver of one rank. `finish`, `layout` and `on_stream` belong to the model's thread; others may use the rest.

    ``model``: any module with ``load_weights(names and tensors)``. ``rank``: in the engine, all of its stages. ``model_path``: the
    checkpoint that adapters are laid over, where there are any. ``engine_streams``: returns the streams on which the engine computes; None:
    they are not known. ``undisturbed``: a context in which the engine leaves the interpreter to other threads. ``forget``: is called on any
    thread whenever other weights are held: what the engine has computed with those before, and keeps under no weight version, must go."""

    def __init__(
        self,
        model: Any,
        rank: int,
        device: torch.device | str,
        model_path: str | None = None,
        engine_streams: Callable[[], Sequence[torch.cuda.Stream]] | None = None,
        undisturbed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._forget = forget
        self.model, self.rank, self.device, self.model_path = model, rank, torch.device(device), model_path
        self.engine_streams, self._undisturbed = engine_streams, undisturbed
        self.known: dict[str, TensorDigest] = {}
        self.version = -1
        self.before_change: set[Callable[[str], None]] = set()  # callbacks of threads that read parameters; called with the reason to stop
        self._digest: str | None = ""
        self._channels: _JoinedChannels | None = None
        self._elsewhere: frozenset[str] = frozenset()
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
        self._forget()
        self.known, self.version, self._digest = dict(known), version, None

    def learn(self, version: int, known: Mapping[str, TensorDigest]) -> None:
        """Notes that the model now holds these tensors, in addition to those already known."""
        self._forget()
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

    def join(self, addresses: Sequence[WeightChannelAddress], first_rank: int, seconds: float, elsewhere: Sequence[str] = ()) -> None:
        """Leaves its present channels and joins these on a thread; `prepare` waits for it. ``first_rank``: of the engine's first process,
        in all channels. ``seconds``: for joining. ``elsewhere``: channels with the same weights, for the processes on other machines."""
        self.leave()
        self._elsewhere = frozenset(elsewhere)
        while len(self._rings) < len(addresses):
            self._rings.append(BucketRing(self.device))
        rank = first_rank + self.rank
        # of several channels the broadcasts must begin in the same order on all engines
        early = self._undisturbed if len(addresses) == 1 and self._streams_known else None

        def channel(address: WeightChannelAddress, ring: BucketRing) -> ChannelReceiver:
            if address.kind == "memory":
                return MemoryReceiver(address, rank, self.device)
            return GroupReceiver(address, rank, self.device, ring, early)

        channels = [channel(address, ring) for address, ring in zip(addresses, self._rings, strict=False)]
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

    def prepare(
        self,
        version: int,
        push: int,
        channels: Sequence[str],
        deadline: TransferDeadline,
        *,
        check: bool = False,
        manifests: Mapping[str, str] | None = None,
    ) -> Reception:
        """Begins to receive a push, from any thread, while the engine may still generate: the transfer begins, nothing is loaded.

        What shares memory with the trainer, or comes to an engine whose streams are not known, begins only in `finish`.

        ``check``: for a comparison with the model's weights. ``manifests``: see `Reception`. Raises ReceiveError: for every failure;
        nothing was touched."""
        try:
            reception = Reception(self, version, push, check, self._joined(channels, deadline), deadline, manifests or {})
            if self._streams_known and all(isinstance(channel, GroupReceiver) for channel in reception.channels):
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)  # of this thread
                reception.begin()
            return reception
        except Exception as error:
            self.leave()
            raise self._failure(error, push, version, touched=False) from error

    def finish(self, reception: Reception) -> dict[str, Any]:
        """Receives the push and loads it, or compares it with the model's weights; on the model's thread.

        Channels on which a push has failed are left, since data of the failed push may still be in transit over them. Returns the fields of
        `shared.schema.weight_messages.WeightsReceived`.

        Raises ReceiveError: for every failure."""
        if not reception.check:
            self.disturb(f"a push of version {reception.version} begins")
        try:
            answer = reception.run()
            reception.report_held(answer["digest"])
            return answer
        except Exception as error:
            if reception.touched:
                self.adopt(-1, {})
            self.leave()
            end = time.monotonic() + 5.0  # seconds for what the GPU still loads
            while self._stream is not None and not self._stream.query() and time.monotonic() < end:
                time.sleep(0.001)
            raise self._failure(error, reception.push, reception.version, reception.touched) from error

    def call_off(self, reception: Reception) -> None:
        """Gives up a push that was prepared and will not be finished; from any thread. Nothing was touched."""
        for channel in reception.channels if reception.begun else ():  # not by `leave`: others may have been joined meanwhile
            channel.close()

    @property
    def _streams_known(self) -> bool:
        return self.device.type != "cuda" or self.engine_streams is not None

    def _failure(self, error: Exception, push: int, version: int, touched: bool) -> ReceiveError:
        if not isinstance(error, MyxoError):
            log.error("push %d of version %d was not received", push, version, exc_info=error)
        return ReceiveError(said_by(error), touched)

    def _joined(self, names: Sequence[str], deadline: TransferDeadline) -> list[ChannelReceiver]:
        channels = self._channels
        if channels is None and self._called_off.issuperset(names):  # the abort came before its command
            raise TransferAborted(f"the joining of channels {sorted(names)} was called off")
        if channels is None or set(names) - set(self.channels) - self._elsewhere:
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
        """Makes the loading stream the current one on a GPU; it starts after all that the engine has submitted to the device before."""
        if self._stream is None:
            yield
            return
        if self.engine_streams is None:
            torch.cuda.synchronize(self.device)  # once per push: the engine's last step may be under way on any stream
        else:  # broadcasts that may never end are on their way, which a wait for the device would include
            for stream in (torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device), *self.engine_streams()):
                self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream):
            yield


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
