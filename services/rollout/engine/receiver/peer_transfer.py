"""Sends weights from engine to engine: a source that serves them sends its parameters, as they are in memory, to a destination.

Each rank sends to the same rank over a group of two, bucket by bucket like a push. The source uses a thread of its own and goes on
generating, since it only reads. Both ends hash the sent tensors, one by one. The source also sends the list of its version's tensors, so
that the destination knows the version's digest without having seen a tensor under its Hugging Face name.

A change of the source's parameters ends the transfer first (`Receiver.before_change`); the destination then holds no valid version.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.rollout.engine.receiver.receiver import ReceiveError, Receiver, said_by
from shared.runtime.errors import BadMessage, MyxoError
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.bucket_hashing import ManifestHasher
from shared.transfer.bucket_ring import bucket_views
from shared.transfer.digest import decoded_digests
from shared.transfer.group_channel import GroupReceiver, GroupSender, on_stream
from shared.transfer.manifest import ITEM_BYTES, Manifest, lay_out
from shared.transfer.weight_channel import POLL_INTERVAL_S, ChannelBroken, TransferDeadline

log = logging.getLogger(__name__)

BUCKET_BYTES = 128 * 1024**2

TRANSFERS = 2
"""The number of transfers that an engine sends at once: each takes two flat buffers of device memory, and a share of the link."""

LINGER_SECONDS = 20.0
BROKEN_LINGER_SECONDS = 2.0
"""The time that the source's store outlives a transfer, for a destination that has not read all of it, and an aborted transfer."""

_PUSH = 0
"""The number of the only push of such a channel."""

_PROOF, _DONE = "proof", "done"
"""The store's keys: the digests of the version's tensors and of the sent ones, and the destination's sign that it is done."""


def send_to_peer(receiver: Receiver, order: Mapping[str, Any], deadline: TransferDeadline) -> dict[str, Any]:
    """Begins to send ``version`` over a channel called ``name`` at ``address``, within ``seconds``. Answers with the channel."""
    if not receiver.known or receiver.version != int(order["version"]):
        raise BadMessage(f"version {order['version']} is not to be had here: this engine holds version {receiver.version}")
    if len(receiver.before_change) >= TRANSFERS:
        raise BadMessage(f"this engine sends to {TRANSFERS} others already")
    transfer = PeerTransfer(receiver, str(order["name"]), str(order["address"]), float(order["seconds"]))
    threading.Thread(target=transfer.run, name=transfer.channel.name, daemon=True).start()
    return {"digest": receiver.digest, "channel": transfer.channel.address.model_dump()}


def receive_from_peer(receiver: Receiver, order: Mapping[str, Any], deadline: TransferDeadline) -> dict[str, Any]:
    """Receives all parameters of ``version`` from ``channels``, one for each rank, on the scheduler's thread; generation stops meanwhile.

    Raises ReceiveError.
    """
    address = WeightChannelAddress.model_validate(order["channels"][receiver.rank])
    channel = GroupReceiver(address, 1, receiver.device)
    try:
        channel.join(deadline)
        return _received(receiver, channel, int(order["version"]), deadline)
    except (MyxoError, RuntimeError) as error:
        raise ReceiveError(said_by(error), touched=not receiver.known) from error
    finally:
        channel.close()


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Returns all tensors of an engine's weights by name, each storage once.

    These are parameters, buffers that are saved with them, and tensors that a model has computed from them (plain attributes of its
    modules).
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


class PeerTransfer:
    """One transfer, at the source."""

    def __init__(self, receiver: Receiver, name: str, address: str, seconds: float) -> None:
        self._receiver, self._deadline = receiver, TransferDeadline(seconds)
        self._known = dict(receiver.known)
        self.channel = GroupSender(name, address, 2, receiver.device, paced=True)
        receiver.before_change.add(self.channel.abort)

    def run(self) -> None:
        channel, linger = self.channel, BROKEN_LINGER_SECONDS
        if self._receiver.device.type == "cuda":
            torch.cuda.set_device(self._receiver.device)  # the current device is per thread
        try:
            channel.join(self._deadline.left)
            self._send()
            linger = LINGER_SECONDS
        except Exception as error:
            channel.abort(said_by(error))
            log.info("transfer %s ended: %s", channel.name, channel.broken)
        finally:
            self._receiver.before_change.discard(channel.abort)
            self._linger(linger)
            channel.close()

    @torch.inference_mode()
    def _send(self) -> None:
        channel, device = self.channel, self._receiver.device
        tensors = tensors_of(self._receiver.model)
        manifest = manifest_of(tensors)
        hasher = ManifestHasher(manifest, device)
        with on_stream(torch.cuda.Stream(device) if device.type == "cuda" else None):  # beside the engine's own
            channel.announce(_PUSH, manifest, self._deadline.left)
            for index, bucket in enumerate(manifest.buckets):
                flat = channel.buffer(index, bucket.nbytes)
                for name, target in bucket_views(bucket, flat):
                    target.copy_(tensors[name])
                hasher.take(index, flat)
                channel.send(index, flat)
            channel.finish()
            sums = hasher.digests()
        channel.raise_if_broken()  # a tensor may have been read after it had begun to change
        channel.note(_PROOF, json.dumps([self._known, sums]))

    def _linger(self, seconds: float) -> None:
        """Keeps the store for as long as the destination may read it."""
        end = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and not self.channel.store.check([_DONE]):
                time.sleep(POLL_INTERVAL_S)


def _received(receiver: Receiver, channel: GroupReceiver, version: int, deadline: TransferDeadline) -> dict[str, Any]:
    started = time.monotonic()
    manifest = channel.manifest(_PUSH, deadline)
    tensors = tensors_of(receiver.model)
    own, theirs = ({slot.name: (slot.dtype, slot.shape) for slot in described.slots()} for described in (manifest_of(tensors), manifest))
    for name in own.keys() | theirs.keys():
        if own.get(name) != theirs.get(name):
            raise BadMessage(f"{name} is {own.get(name, 'not there')} in this engine, {theirs.get(name, 'not there')} in the source's")
    hasher = ManifestHasher(manifest, receiver.device)
    receiver.adopt(-1, {})  # from here on the model holds a mixture of versions
    with torch.inference_mode(), receiver.on_stream():
        for index, bucket in enumerate(manifest.buckets):
            flat = channel.take(index, bucket.nbytes, deadline)
            for name, sent in bucket_views(bucket, flat):
                tensors[name].copy_(sent)
            hasher.take(index, flat)
            channel.release(index)
        got = hasher.digests()
        if receiver.device.type == "cuda":
            torch.cuda.current_stream(receiver.device).synchronize()
    try:
        known, sums = map(decoded_digests, json.loads(channel.read(_PROOF, "the digests of what was sent", deadline)))
    except (ValueError, TypeError, AttributeError) as error:
        raise BadMessage(f"{channel.source}: digests that cannot be read: {error}") from error
    if differing := [name for name, found in got.items() if sums.get(name) != found]:
        raise ChannelBroken(f"{len(differing)} tensors did not arrive as they were sent, {differing[0]} among them")
    receiver.adopt(version, known)
    with contextlib.suppress(RuntimeError):  # the source need not wait any longer; it would only wait for a limited time anyway
        channel.store.set(_DONE, "1")
    return {"digest": receiver.digest, "bytes": manifest.nbytes, "seconds": time.monotonic() - started}


def manifest_of(tensors: Mapping[str, Tensor]) -> Manifest:
    """Returns the manifest of these tensors. Raises BadMessage if a tensor is of a dtype that cannot be sent."""
    described = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise BadMessage(f"{name} is of dtype {dtype}, which does not travel between engines")
        described.append((name, dtype, tuple(tensor.shape)))
    return lay_out(described, BUCKET_BYTES)
