"""Weights from engine to engine: one that serves lends its parameters, as they lie in memory, to one that has just come.

Rank to rank over a group of two, bucket by bucket like a push, on a thread of its own at both ends: the lender goes on generating, for
reading disturbs nobody. Both ends hash what went over the wire, tensor by tensor. The lender's list of its version's tensors comes along,
so that the borrower knows the version's digest without having seen a tensor under its Hugging Face name.

Whatever changes the lender's parameters ends the loan first (`Receiver.before_change`): what the borrower has then is of no version.
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

from services.rollout.engine.receiver import command_session, load_plan
from services.rollout.engine.receiver.channel_receiver import POLL_INTERVAL_S, BucketRing, ChannelBroken, ReceiveDeadline, run_in_thread
from services.rollout.engine.receiver.group_receiver import GroupReceiver
from services.rollout.engine.receiver.receiver import ReceiveError, Receiver
from shared.runtime.errors import BadMessage, MyxoError
from shared.schema.messages import WeightChannelAddress
from shared.transfer.bucket_hashing import Hasher
from shared.transfer.digest import TensorDigest
from shared.transfer.manifest import ITEM_BYTES, Bucket, Manifest, lay_out

log = logging.getLogger(__name__)

BUCKET_BYTES = 128 * 1024**2

LOANS = 2
"""At once: each takes two flat buffers of the device's memory, and a share of the link."""

LINGER_SECONDS = 20.0
BROKEN_LINGER_SECONDS = 2.0
"""How long the lender's store outlives the loan, for a borrower that has not read all of it; and one that was broken off."""

_LOAN = 0
"""Number of the only push of such a lane."""

_OPEN, _NAMED, _SUMS, _DONE = "open", "tensors", "sums", "done"
"""The store's keys: that the group is being made; what the version's tensors are; the digests of what was sent; that the borrower needs
nothing more."""


def lend(receiver: Receiver, order: Mapping[str, Any], watch: ReceiveDeadline) -> dict[str, Any]:
    """Begins to lend: ``version``, ``name`` of the lane, ``address`` of this host, ``seconds`` for all of it. Answers with the port."""
    if not receiver.known or receiver.version != int(order["version"]):
        raise BadMessage(f"version {order['version']} is not to be had here: this engine holds version {receiver.version}")
    if len(receiver.before_change) >= LOANS:
        raise BadMessage(f"this engine lends to {LOANS} others already")
    loan = _Loan(receiver, str(order["name"]), str(order["address"]), float(order["seconds"]))
    threading.Thread(target=loan.run, name=loan.lane.name, daemon=True).start()
    return {"digest": receiver.digest, "channel": loan.lane.model_dump()}


def borrow(receiver: Receiver, order: Mapping[str, Any], watch: ReceiveDeadline) -> dict[str, Any]:
    """Takes all parameters of ``version`` from ``lanes``, one for each rank, in the scheduler's place: nothing is generated meanwhile.

    Raises ReceiveError.
    """
    lane = WeightChannelAddress.model_validate(order["channels"][receiver.rank])
    wire = _BorrowersEnd(lane, 1, BucketRing(receiver.device), receiver.device)
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


class _LendersEnd(GroupReceiver):
    """Rank 0 of the two, and the store's host."""

    def __init__(self, name: str, address: str, device: torch.device, watch: ReceiveDeadline) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = TCPStore(address, 0, 2, is_master=True, timeout=datetime.timedelta(seconds=watch.left), wait_for_workers=False)
        lane = WeightChannelAddress(kind="group", name=name, address=address, port=store.port, backend=backend, world_size=2)
        super().__init__(lane, 0, BucketRing(device), device)
        self.lane = lane
        self._store = store
        self._source = self._waiting_for = f"the borrower of lane {name}"

    def join(self, watch: ReceiveDeadline) -> None:
        own = PrefixStore(self.name, self._the_store())
        self._watched(watch, lambda: own.check(["here/1"]), "joining")
        watch.look("joining", self._source)
        self.note(_OPEN, b"1")
        made = run_in_thread(lambda: self._made(own, watch.left), f"join-{self.name}")
        made.add_done_callback(self._close_late)
        watch.until(made.done, f"joining lane {self.name}", self._source)
        self._group = made.result()

    def has_left(self) -> bool:
        """Whether the borrower needs nothing more."""
        return bool(self._the_store().check([_DONE]))

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Where buckets are filled and sent: beside the engine's own stream."""
        return self._on_stream()

    def note(self, key: str, value: bytes) -> None:
        self._the_store().set(key, value)  # type: ignore[arg-type]  # bytes are fine

    def give(self, flat: Tensor, watch: ReceiveDeadline) -> Any:
        """Begins to send a bucket; returns what asks whether it has left."""
        if self._group is None:
            raise ChannelBroken(self._broken or f"lane {self.name} was not joined")
        work = self._group.broadcast([flat], self._options(watch.left))
        if self._stream is None:
            return lambda: work.is_completed()
        work.wait()  # of the stream, not of this thread
        sent = torch.cuda.Event()
        sent.record()
        return sent.query


class _BorrowersEnd(GroupReceiver):
    """Rank 1 of the two."""

    def join(self, watch: ReceiveDeadline) -> None:
        store = self._store = self._connected(watch)
        own = PrefixStore(self.name, store)
        own.set("here/1", "1")
        # whoever has begun to make the group cannot be called back, and keeps the store's connection to itself
        self.noted(_OPEN, "the beginning of a loan", watch)
        made = run_in_thread(lambda: self._made(own, watch.left), f"join-{self.name}")
        made.add_done_callback(self._close_late)
        try:
            watch.until(made.done, f"joining lane {self.name}", self._source)
        except MyxoError as error:
            self._broken = str(error)
            raise
        self._group = made.result()

    def noted(self, key: str, what: str, watch: ReceiveDeadline) -> Any:
        """What the lender has written down. Raises WireBroken, BadMessage."""
        store, given_up = self._the_store(), f"aborted/{_LOAN}"

        def look() -> bytes | None:
            if store.check([given_up]):
                raise ChannelBroken(f"{self._source} has ended the loan: {store.get(given_up).decode(errors='replace')}")
            return store.get(key) if store.check([key]) else None

        try:
            return json.loads(self._watched(watch, look, what))
        except ValueError as error:
            raise BadMessage(f"{self._source}: {what} that cannot be read: {error}") from error

    def leave_word(self) -> None:
        """The lender need not wait any longer. It will in any case not wait for long."""
        with contextlib.suppress(RuntimeError):
            self._the_store().set(_DONE, "1")


class _Loan:
    """One loan, at the lender's."""

    def __init__(self, receiver: Receiver, name: str, address: str, seconds: float) -> None:
        self._receiver, self._watch = receiver, ReceiveDeadline(seconds, "the loan is given up")
        self._known, self._version, self._digest = dict(receiver.known), receiver.version, receiver.digest
        self._ended: str | None = None
        self._wire = _LendersEnd(name, address, receiver.device, self._watch)
        self.lane = self._wire.lane
        receiver.before_change.add(self._end)

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._watch.abort()

    def run(self) -> None:
        wire, linger = self._wire, BROKEN_LINGER_SECONDS
        if self._receiver.device.type == "cuda":
            torch.cuda.set_device(self._receiver.device)  # of this thread
        try:
            wire.join(self._watch)
            self._send()
            linger = LINGER_SECONDS
        except Exception as error:
            reason = self._ended or (str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}")
            log.info("loan %s of version %d ended: %s", wire.name, self._version, reason)
            try:
                wire.note(f"aborted/{_LOAN}", reason.encode())
            except (MyxoError, RuntimeError):
                log.info("the borrower of %s is gone", wire.name)
        finally:
            self._receiver.before_change.discard(self._end)
            _linger(wire, linger)
            wire.close()

    @torch.inference_mode()
    def _send(self) -> None:
        wire, watch = self._wire, self._watch
        tensors = held(self._receiver.model)
        manifest = manifest_of(tensors)
        wire.note(_NAMED, json.dumps({"version": self._version, "digest": self._digest, "tensors": _as_json(self._known)}).encode())
        wire.note(f"manifest/{_LOAN}", b"M" + manifest.encoded)
        largest = max(bucket.nbytes for bucket in manifest.buckets)
        hasher, under_way = _hasher(self._receiver.device), deque[Any]()
        with wire.on_stream():
            # of this stream's own memory: what the engine's stream has just given back it may still be reading
            buffers = [torch.empty(largest, dtype=torch.uint8, device=self._receiver.device) for _ in range(2)]
            for number, bucket in enumerate(manifest.buckets):
                if len(under_way) == len(buffers):
                    watch.until(under_way.popleft(), f"bucket {number - 2} of a loan", "the borrower")
                flat = buffers[number % 2][: bucket.nbytes]
                for name, place in load_plan.views(bucket, flat):
                    place.copy_(tensors[name])
                hasher.take(bucket, flat)
                under_way.append(wire.give(flat, watch))
            for left in under_way:
                watch.until(left, "the last buckets of a loan", "the borrower")
            sums = hasher.known()
        if self._ended is not None:  # a tensor may have been read after it had begun to change
            raise ChannelBroken(self._ended)
        wire.note(_SUMS, json.dumps({name: f"{known.digest:016x}" for name, known in sums.items()}).encode())


def _linger(wire: _LendersEnd, seconds: float) -> None:
    """Keeps the store for as long as the borrower may read it."""
    end = time.monotonic() + seconds
    with contextlib.suppress(MyxoError, RuntimeError):
        while time.monotonic() < end and not wire.has_left():
            time.sleep(POLL_INTERVAL_S)


def _borrowed(receiver: Receiver, wire: _BorrowersEnd, version: int, watch: ReceiveDeadline) -> dict[str, Any]:
    started = time.monotonic()
    named = wire.noted(_NAMED, "the list of a version's tensors", watch)
    known = {name: TensorDigest(dtype, tuple(shape), int(found, 16)) for name, (dtype, shape, found) in named["tensors"].items()}
    if named["version"] != version:
        raise BadMessage(f"version {named['version']} is lent where {version} was asked for")
    manifest = wire.manifest(_LOAN, watch)
    tensors = held(receiver.model)
    own = {slot.name: (slot.dtype, slot.shape) for slot in manifest_of(tensors).slots()}
    lent = {slot.name: (slot.dtype, slot.shape) for slot in manifest.slots()}
    for name in own.keys() | lent.keys():
        if own.get(name) != lent.get(name):
            raise BadMessage(f"{name} is {own.get(name, 'not there')} in this engine, {lent.get(name, 'not there')} in the lender's")
    hasher = _hasher(receiver.device)
    receiver.adopt(-1, {})  # from here on it holds a mixture
    with torch.inference_mode(), receiver.on_stream():
        for number, bucket in enumerate(manifest.buckets):
            flat = wire.take(number, bucket.nbytes, watch)
            _store(bucket, flat, tensors)
            hasher.take(bucket, flat)
            wire.release(number)
        got = hasher.known()
        if receiver.device.type == "cuda":
            torch.cuda.current_stream(receiver.device).synchronize()
    sums = wire.noted(_SUMS, "the sums of what was lent", watch)
    differing = [name for name, found in got.items() if sums.get(name) != f"{found.digest:016x}"]
    if differing:
        raise ChannelBroken(f"{len(differing)} tensors did not arrive as they were sent, {differing[0]} among them")
    receiver.adopt(version, known)
    if receiver.digest != named["digest"]:
        receiver.adopt(-1, {})
        raise BadMessage("the lender's digest is not that of the tensors that it names")
    wire.leave_word()
    return {"digest": receiver.digest, "bytes": sum(b.nbytes for b in manifest.buckets), "seconds": time.monotonic() - started}


def _store(bucket: Bucket, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    for name, lent in load_plan.views(bucket, flat):
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


def _hasher(device: torch.device) -> Hasher:
    return Hasher(lambda table: torch.from_numpy(table).to(device))


command_session.AT_ONCE["lend"] = lend
command_session.QUEUED["borrow"] = borrow
