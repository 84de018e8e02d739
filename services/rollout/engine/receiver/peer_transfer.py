"""Sends weights from engine to engine: a source that serves them sends its parameters, as they lie in memory, to a destination.

Each rank sends to the same rank over a group of two, bucket by bucket like a push. The source uses a thread of its own and goes on
generating, for reading disturbs nobody. Both ends hash what was sent, tensor by tensor. The source's list of its version's tensors comes
along, so that the destination knows the version's digest without having seen a tensor under its Hugging Face name.

Whatever changes the source's parameters ends the transfer first (`Receiver.before_change`): what the destination has then is of no version.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from services.rollout.engine.receiver import load_plan
from services.rollout.engine.receiver.channel_receiver import POLL_INTERVAL_S, BucketRing, ChannelBroken, ReceiveDeadline, run_in_thread
from services.rollout.engine.receiver.group_receiver import GroupReceiver
from services.rollout.engine.receiver.receiver import ReceiveError, Receiver
from shared.runtime.errors import BadMessage, MyxoError
from shared.schema.messages import WeightChannelAddress
from shared.transfer.bucket_hashing import Hasher
from shared.transfer.digest import TensorDigest
from shared.transfer.manifest import ITEM_BYTES, Manifest, lay_out

log = logging.getLogger(__name__)

BUCKET_BYTES = 128 * 1024**2

TRANSFERS = 2
"""How many an engine sends at once: each takes two flat buffers of the device's memory, and a share of the link."""

LINGER_SECONDS = 20.0
BROKEN_LINGER_SECONDS = 2.0
"""How long the source's store outlives a transfer, for a destination that has not read all of it; and one that was broken off."""

_PUSH = 0
"""The number of the only push of such a channel."""

_OPEN, _TENSORS, _SUMS, _DONE = "open", "tensors", "sums", "done"
"""The store's keys: that the group is being made; what the version's tensors are; the digests of what was sent; that the destination needs
nothing more."""


def send_to_peer(receiver: Receiver, order: Mapping[str, Any], watch: ReceiveDeadline) -> dict[str, Any]:
    """Begins to send ``version`` over a channel called ``name`` at ``address``, within ``seconds``. Answers with the channel."""
    if not receiver.known or receiver.version != int(order["version"]):
        raise BadMessage(f"version {order['version']} is not to be had here: this engine holds version {receiver.version}")
    if len(receiver.before_change) >= TRANSFERS:
        raise BadMessage(f"this engine sends to {TRANSFERS} others already")
    transfer = PeerTransfer(receiver, str(order["name"]), str(order["address"]), float(order["seconds"]))
    threading.Thread(target=transfer.run, name=transfer.channel.name, daemon=True).start()
    return {"digest": receiver.digest, "channel": transfer.channel.address.model_dump()}


def receive_from_peer(receiver: Receiver, order: Mapping[str, Any], watch: ReceiveDeadline) -> dict[str, Any]:
    """Takes all parameters of ``version`` from ``channels``, one for each rank, on the scheduler's thread: nothing is generated meanwhile.

    Raises ReceiveError.
    """
    address = WeightChannelAddress.model_validate(order["channels"][receiver.rank])
    channel = DestinationChannel(address, 1, BucketRing(receiver.device), receiver.device)
    try:
        channel.join(watch)
        return _received(receiver, channel, int(order["version"]), watch)
    except (MyxoError, RuntimeError) as error:
        reason = str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}"
        raise ReceiveError(reason, touched=not receiver.known) from error
    finally:
        channel.close()


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Returns all that an engine's weights are, by name, each storage once.

    These are parameters, buffers that are saved with them, and what a model has computed from them and keeps beside (plain attributes of
    its modules).
    """
    found: dict[str, Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[prefix + name] = buffer
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found.setdefault(f"{prefix}{name}", value)
    once: dict[tuple[int, int], tuple[str, Tensor]] = {}
    for name, tensor in found.items():
        if tensor.numel():
            once.setdefault((tensor.data_ptr(), tensor.nbytes), (name, tensor.detach()))
    return dict(once.values())


class PeerChannel(GroupReceiver):
    """A group of two."""

    def _make_group(self, own: PrefixStore, watch: ReceiveDeadline) -> None:
        made = run_in_thread(lambda: self._made(own, watch.left), f"join-{self.name}")
        made.add_done_callback(self._close_late)
        try:
            watch.until(made.done, f"joining channel {self.name}", self._source)
        except MyxoError as error:
            self._broken = str(error)
            raise
        self._group = made.result()


class SourceChannel(PeerChannel):
    """The source's end: rank 0 of the two, and the store's host."""

    def __init__(self, name: str, address: str, device: torch.device, watch: ReceiveDeadline) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = TCPStore(address, 0, 2, is_master=True, timeout=datetime.timedelta(seconds=watch.left), wait_for_workers=False)
        self.address = WeightChannelAddress(kind="group", name=name, address=address, port=store.port, backend=backend, world_size=2)
        super().__init__(self.address, 0, BucketRing(device), device)
        self._store = store
        self._source = self._waiting_for = f"the destination of channel {name}"

    def join(self, watch: ReceiveDeadline) -> None:
        own = PrefixStore(self.name, self._the_store())
        self._watched(watch, lambda: own.check(["here/1"]), "joining")
        watch.look("joining", self._source)
        self.note(_OPEN, b"1")
        self._make_group(own, watch)

    def has_left(self) -> bool:
        """Returns whether the destination needs nothing more."""
        return bool(self._the_store().check([_DONE]))

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Returns where buckets are filled and sent: beside the engine's own stream."""
        return self._on_stream()

    def note(self, key: str, value: bytes) -> None:
        self._the_store().set(key, value)  # type: ignore[arg-type]  # bytes are fine

    def send(self, flat: Tensor, watch: ReceiveDeadline) -> Any:
        """Begins to send a bucket; returns a function that says whether it has left."""
        if self._group is None:
            raise ChannelBroken(self._broken or f"channel {self.name} was not joined")
        work = self._group.broadcast([flat], self._options(watch.left))
        if self._stream is None:
            return lambda: work.is_completed()
        work.wait()  # of the stream, not of this thread
        sent = torch.cuda.Event()
        sent.record()
        return sent.query


class DestinationChannel(PeerChannel):
    """The destination's end: rank 1 of the two."""

    def join(self, watch: ReceiveDeadline) -> None:
        store = self._store = self._connected(watch)
        own = PrefixStore(self.name, store)
        own.set("here/1", "1")
        # whoever has begun to make the group cannot be called back, and keeps the store's connection to itself
        self.noted(_OPEN, "the beginning of a transfer", watch)
        self._make_group(own, watch)

    def noted(self, key: str, what: str, watch: ReceiveDeadline) -> Any:
        """Waits for what the source has written down, and returns it. Raises ChannelBroken, BadMessage."""
        store, given_up = self._the_store(), f"aborted/{_PUSH}"

        def look() -> bytes | None:
            if store.check([given_up]):
                raise ChannelBroken(f"{self._source} has ended the transfer: {store.get(given_up).decode(errors='replace')}")
            return store.get(key) if store.check([key]) else None

        try:
            return json.loads(self._watched(watch, look, what))
        except ValueError as error:
            raise BadMessage(f"{self._source}: {what} that cannot be read: {error}") from error

    def leave_word(self) -> None:
        """Tells the source that it need not wait any longer. It will in any case not wait for long."""
        with contextlib.suppress(RuntimeError):
            self._the_store().set(_DONE, "1")


class PeerTransfer:
    """One transfer, at the source's."""

    def __init__(self, receiver: Receiver, name: str, address: str, seconds: float) -> None:
        self._receiver, self._watch = receiver, ReceiveDeadline(seconds, "the transfer is given up")
        self._version = {"version": receiver.version, "digest": receiver.digest, "tensors": _as_json(receiver.known)}
        self._ended: str | None = None
        self.channel = SourceChannel(name, address, receiver.device, self._watch)
        receiver.before_change.add(self._end)

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._watch.abort()

    def run(self) -> None:
        channel, linger = self.channel, BROKEN_LINGER_SECONDS
        if self._receiver.device.type == "cuda":
            torch.cuda.set_device(self._receiver.device)  # of this thread
        try:
            channel.join(self._watch)
            self._send()
            linger = LINGER_SECONDS
        except Exception as error:
            reason = self._ended or (str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}")
            log.info("transfer %s of version %d ended: %s", channel.name, self._version["version"], reason)
            try:
                channel.note(f"aborted/{_PUSH}", reason.encode())
            except (MyxoError, RuntimeError):
                log.info("the destination of %s is gone", channel.name)
        finally:
            self._receiver.before_change.discard(self._end)
            self._linger(linger)
            channel.close()

    @torch.inference_mode()
    def _send(self) -> None:
        channel, watch, device = self.channel, self._watch, self._receiver.device
        tensors = tensors_of(self._receiver.model)
        manifest = manifest_of(tensors)
        channel.note(_TENSORS, json.dumps(self._version).encode())
        channel.note(f"manifest/{_PUSH}", b"M" + manifest.encoded)
        largest = max(bucket.nbytes for bucket in manifest.buckets)
        hasher, under_way = _hasher(device), deque[Any]()
        with channel.on_stream():
            # of this stream's own memory: what the engine's stream has just given back it may still be reading
            buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
            for index, bucket in enumerate(manifest.buckets):
                if len(under_way) == len(buffers):
                    watch.until(under_way.popleft(), f"bucket {index - 2} of a transfer", "the destination")
                flat = buffers[index % 2][: bucket.nbytes]
                for name, target in load_plan.views(bucket, flat):
                    target.copy_(tensors[name])
                hasher.take(bucket, flat)
                under_way.append(channel.send(flat, watch))
            for left in under_way:
                watch.until(left, "the last buckets of a transfer", "the destination")
            sums = hasher.known()
        if self._ended is not None:  # a tensor may have been read after it had begun to change
            raise ChannelBroken(self._ended)
        channel.note(_SUMS, json.dumps({name: f"{tensor.digest:016x}" for name, tensor in sums.items()}).encode())

    def _linger(self, seconds: float) -> None:
        """Keeps the store for as long as the destination may read it."""
        end = time.monotonic() + seconds
        with contextlib.suppress(MyxoError, RuntimeError):
            while time.monotonic() < end and not self.channel.has_left():
                time.sleep(POLL_INTERVAL_S)


def _received(receiver: Receiver, channel: DestinationChannel, version: int, watch: ReceiveDeadline) -> dict[str, Any]:
    started = time.monotonic()
    offered = channel.noted(_TENSORS, "the list of a version's tensors", watch)
    known = {name: TensorDigest(dtype, tuple(shape), int(found, 16)) for name, (dtype, shape, found) in offered["tensors"].items()}
    if offered["version"] != version:
        raise BadMessage(f"version {offered['version']} is sent where {version} was asked for")
    manifest = channel.manifest(_PUSH, watch)
    tensors = tensors_of(receiver.model)
    own, theirs = ({slot.name: (slot.dtype, slot.shape) for slot in described.slots()} for described in (manifest_of(tensors), manifest))
    for name in own.keys() | theirs.keys():
        if own.get(name) != theirs.get(name):
            raise BadMessage(f"{name} is {own.get(name, 'not there')} in this engine, {theirs.get(name, 'not there')} in the source's")
    hasher = _hasher(receiver.device)
    receiver.adopt(-1, {})  # from here on it holds a mixture
    with torch.inference_mode(), receiver.on_stream():
        for index, bucket in enumerate(manifest.buckets):
            flat = channel.take(index, bucket.nbytes, watch)
            for name, sent in load_plan.views(bucket, flat):
                tensors[name].copy_(sent)
            hasher.take(bucket, flat)
            channel.release(index)
        got = hasher.known()
        if receiver.device.type == "cuda":
            torch.cuda.current_stream(receiver.device).synchronize()
    sums = channel.noted(_SUMS, "the sums of what was sent", watch)
    differing = [name for name, found in got.items() if sums.get(name) != f"{found.digest:016x}"]
    if differing:
        raise ChannelBroken(f"{len(differing)} tensors did not arrive as they were sent, {differing[0]} among them")
    receiver.adopt(version, known)
    if receiver.digest != offered["digest"]:
        receiver.adopt(-1, {})
        raise BadMessage("the source's digest is not that of the tensors that it names")
    channel.leave_word()
    return {"digest": receiver.digest, "bytes": sum(b.nbytes for b in manifest.buckets), "seconds": time.monotonic() - started}


def manifest_of(tensors: Mapping[str, Tensor]) -> Manifest:
    """Raises BadMessage if a tensor is of a dtype that cannot be sent."""
    described = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise BadMessage(f"{name} is of dtype {dtype}, which does not travel between engines")
        described.append((name, dtype, tuple(tensor.shape)))
    return lay_out(described, BUCKET_BYTES)


def _as_json(known: Mapping[str, TensorDigest]) -> dict[str, Any]:
    return {name: [tensor.dtype, list(tensor.shape), f"{tensor.digest:016x}"] for name, tensor in known.items()}


def _hasher(device: torch.device) -> Hasher:
    return Hasher(lambda table: torch.from_numpy(table).to(device))
