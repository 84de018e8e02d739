"""Weights from engine to engine: one that serves lends its parameters, as they lie in memory, to one that has just come.

Rank to rank over a group of two, bucket by bucket like a push, on a thread of its own at both ends: the lender goes on generating, for
reading disturbs nobody. Both ends hash what went over the wire, tensor by tensor. The lender's list of its version's tensors comes along,
so that the borrower knows the version's digest without having seen a tensor under its Hugging Face name.

Whatever changes the lender's parameters ends the loan first (`Receiver.before_change`): what the borrower has then is of no version.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.rollout.engine.receiver.receiver import ReceiveError, Receiver
from shared.runtime.errors import BadMessage, MyxoError
from shared.schema.messages import WeightChannelAddress
from shared.transfer.bucket_hashing import ManifestHasher
from shared.transfer.bucket_ring import bucket_views
from shared.transfer.digest import TensorDigest
from shared.transfer.group_channel import GroupReceiver, GroupSender, on_stream
from shared.transfer.manifest import ITEM_BYTES, Bucket, Manifest, lay_out
from shared.transfer.weight_channel import POLL_INTERVAL_S, ChannelBroken, TransferDeadline

log = logging.getLogger(__name__)

BUCKET_BYTES = 128 * 1024**2

LOANS = 2
"""At once: each takes two flat buffers of the device's memory, and a share of the link."""

LINGER_SECONDS = 20.0
BROKEN_LINGER_SECONDS = 2.0
"""How long the lender's store outlives the loan, for a borrower that has not read all of it; and one that was broken off."""

_LOAN = 0
"""Number of the only push of such a lane."""

_NAMED, _SUMS, _DONE = "tensors", "sums", "done"
"""The store's keys: what the version's tensors are; the digests of what was sent; that the borrower needs nothing more."""


def lend(receiver: Receiver, order: Mapping[str, Any], watch: TransferDeadline) -> dict[str, Any]:
    """Begins to lend: ``version``, ``name`` of the lane, ``address`` of this host, ``seconds`` for all of it. Answers with the port."""
    if not receiver.known or receiver.version != int(order["version"]):
        raise BadMessage(f"version {order['version']} is not to be had here: this engine holds version {receiver.version}")
    if len(receiver.before_change) >= LOANS:
        raise BadMessage(f"this engine lends to {LOANS} others already")
    loan = _Loan(receiver, str(order["name"]), str(order["address"]), float(order["seconds"]))
    threading.Thread(target=loan.run, name=loan.address.name, daemon=True).start()
    return {"digest": receiver.digest, "channel": loan.address.model_dump()}


def borrow(receiver: Receiver, order: Mapping[str, Any], watch: TransferDeadline) -> dict[str, Any]:
    """Takes all parameters of ``version`` from ``lanes``, one for each rank, in the scheduler's place: nothing is generated meanwhile.

    Raises ReceiveError.
    """
    wire = GroupReceiver(WeightChannelAddress.model_validate(order["channels"][receiver.rank]), 1, receiver.device)
    try:
        wire.join(watch)
        return _borrowed(receiver, wire, int(order["version"]), watch)
    except (MyxoError, RuntimeError) as error:
        reason = str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}"
        raise ReceiveError(reason, touched=not receiver.known) from error
    finally:
        wire.close()


def held(model: Any) -> dict[str, Tensor]:
    """All that an engine's weights are, by name: parameters, buffers that are saved with them, and what a model has computed from
    them and keeps beside (plain attributes of its modules). Each storage once.
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
    seen: set[tuple[int, int]] = set()
    once = {}
    for name, tensor in found.items():
        place = tensor.data_ptr(), tensor.nbytes
        if tensor.numel() and place not in seen:
            seen.add(place)
            once[name] = tensor.detach()
    return once


class _Loan:
    """One loan, at the lender's."""

    def __init__(self, receiver: Receiver, name: str, address: str, seconds: float) -> None:
        self._receiver, self._deadline = receiver, TransferDeadline(seconds)
        self._known, self._version, self._digest = dict(receiver.known), receiver.version, receiver.digest
        self._sender = GroupSender(name, address, 2, receiver.device, paced=True)
        self.address = self._sender.address
        receiver.before_change.add(self._sender.abort)

    def run(self) -> None:
        sender, linger = self._sender, BROKEN_LINGER_SECONDS
        if self._receiver.device.type == "cuda":
            torch.cuda.set_device(self._receiver.device)  # of this thread
        try:
            sender.join(self._deadline.left)
            self._send()
            linger = LINGER_SECONDS
        except Exception as error:
            sender.abort(str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}")
            log.info("loan %s of version %d ended: %s", sender.name, self._version, sender.broken)
        finally:
            self._receiver.before_change.discard(sender.abort)
            _linger(sender, linger)
            sender.close()

    @torch.inference_mode()
    def _send(self) -> None:
        sender, device = self._sender, self._receiver.device
        tensors = held(self._receiver.model)
        manifest = manifest_of(tensors)
        hasher = ManifestHasher(manifest, device)
        sender.note(_NAMED, json.dumps({"version": self._version, "digest": self._digest, "tensors": _as_json(self._known)}))
        with on_stream(torch.cuda.Stream(device) if device.type == "cuda" else None):  # beside the engine's own
            sender.announce(_LOAN, manifest, self._deadline.left)
            for index, bucket in enumerate(manifest.buckets):
                flat = sender.buffer(index, bucket.nbytes)
                for name, target in bucket_views(bucket, flat):
                    target.copy_(tensors[name])
                hasher.take(index, flat)
                sender.send(index, flat)
            sender.finish()
            sums = hasher.digests()
        sender.raise_if_broken()  # a tensor may have been read after it had begun to change
        sender.note(_SUMS, json.dumps({name: f"{known.digest:016x}" for name, known in sums.items()}))


def _linger(sender: GroupSender, seconds: float) -> None:
    """Keeps the store for as long as the borrower may read it."""
    end = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):
        while time.monotonic() < end and not sender.store.check([_DONE]):
            time.sleep(POLL_INTERVAL_S)


def _borrowed(receiver: Receiver, wire: GroupReceiver, version: int, deadline: TransferDeadline) -> dict[str, Any]:
    started = time.monotonic()
    named = _noted(wire, _NAMED, "the list of a version's tensors", deadline)
    known = {name: TensorDigest(dtype, tuple(shape), int(found, 16)) for name, (dtype, shape, found) in named["tensors"].items()}
    if named["version"] != version:
        raise BadMessage(f"version {named['version']} is lent where {version} was asked for")
    manifest = wire.manifest(_LOAN, deadline)
    tensors = held(receiver.model)
    own = {slot.name: (slot.dtype, slot.shape) for slot in manifest_of(tensors).slots()}
    lent = {slot.name: (slot.dtype, slot.shape) for slot in manifest.slots()}
    for name in own.keys() | lent.keys():
        if own.get(name) != lent.get(name):
            raise BadMessage(f"{name} is {own.get(name, 'not there')} in this engine, {lent.get(name, 'not there')} in the lender's")
    hasher = ManifestHasher(manifest, receiver.device)
    receiver.adopt(-1, {})  # from here on it holds a mixture
    with torch.inference_mode(), receiver.on_stream():
        for index, bucket in enumerate(manifest.buckets):
            flat = wire.take(index, bucket.nbytes, deadline)
            _store(bucket, flat, tensors)
            hasher.take(index, flat)
            wire.release(index)
        got = hasher.digests()
        if receiver.device.type == "cuda":
            torch.cuda.current_stream(receiver.device).synchronize()
    sums = _noted(wire, _SUMS, "the sums of what was lent", deadline)
    differing = [name for name, found in got.items() if sums.get(name) != f"{found.digest:016x}"]
    if differing:
        raise ChannelBroken(f"{len(differing)} tensors did not arrive as they were sent, {differing[0]} among them")
    receiver.adopt(version, known)
    if receiver.digest != named["digest"]:
        receiver.adopt(-1, {})
        raise BadMessage("the lender's digest is not that of the tensors that it names")
    with contextlib.suppress(RuntimeError):  # the lender need not wait any longer, and will in any case not wait for long
        wire.store.set(_DONE, "1")
    return {"digest": receiver.digest, "bytes": sum(b.nbytes for b in manifest.buckets), "seconds": time.monotonic() - started}


def _noted(wire: GroupReceiver, key: str, what: str, deadline: TransferDeadline) -> Any:
    """Returns what the lender has written down. Raises ChannelBroken, BadMessage."""
    try:
        return json.loads(wire.read(key, what, deadline))
    except ValueError as error:
        raise BadMessage(f"{wire.source}: {what} that cannot be read: {error}") from error


def _store(bucket: Bucket, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    for name, lent in bucket_views(bucket, flat):
        tensors[name].copy_(lent)


def manifest_of(tensors: Mapping[str, Tensor]) -> Manifest:
    """Raises BadMessage: a tensor of a dtype that does not travel."""
    described = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise BadMessage(f"{name} is of dtype {dtype}, which does not travel between engines")
        described.append((name, dtype, tuple(tensor.shape)))
    return lay_out(described, BUCKET_BYTES)


def _as_json(known: Mapping[str, TensorDigest]) -> dict[str, Any]:
    return {name: [tensor.dtype, list(tensor.shape), f"{tensor.digest:016x}"] for name, tensor in known.items()}
