"""Sends weights from engine to engine: a source that serves a version sends its tensors to a destination, as they were pushed.

Each of the source's ranks looks up which parameters loading a tensor would set, and puts what it holds of the tensor back in its place. All
of the destination's ranks take from all of the source's, lay the parts over each other, and load, hash and count the tensors as in a push:
what comes is known by its own digest, which must be the one that the trainer has told of the version. Nothing that the source says of its
weights is believed. The source uses a thread of its own and continues to generate, since it only reads.

A change of the source's parameters ends the transfer first (`Receiver.before_change`).
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from services.rollout.engine.private_endpoints import ADDRESS_VARIABLE
from services.rollout.engine.receiver import load_plan
from services.rollout.engine.receiver.load_plan import TensorCopy
from services.rollout.engine.receiver.receiver import PEER_DONE, Receiver, said_by
from shared.runtime.errors import BadMessage
from shared.transfer.group_channel import GroupSender, on_stream
from shared.transfer.manifest import Bucket, lay_out
from shared.transfer.weight_channel import POLL_INTERVAL_S, TransferDeadline

log = logging.getLogger(__name__)

BUCKET_BYTES = 128 * 1024**2  # the bytes of a bucket, over the number of ranks: a destination has buffers for all of them
TRANSFERS = 2  # the number of transfers that an engine sends at once: each takes two flat buffers of device memory, and a share of the link

# The time that the source's store outlives a transfer, for a destination that has not read all of it, and an aborted transfer.
LINGER_SECONDS = 20.0
BROKEN_LINGER_SECONDS = 2.0


def send_to_peer(receiver: Receiver, order: Mapping[str, Any], deadline: TransferDeadline) -> dict[str, Any]:
    """Begins to send ``version`` to ``ranks`` ranks over a channel called ``name`` at ``address``, within ``seconds``. The destination
    receives it as push number ``version``. Answers with the channel. Raises BadMessage: it cannot be had here."""
    if not receiver.known or receiver.version != int(order["version"]):
        raise BadMessage(f"version {order['version']} is not to be had here: this engine holds version {receiver.version}")
    if len(receiver.before_change) >= TRANSFERS:
        raise BadMessage(f"this engine sends to {TRANSFERS} others already")
    address = os.environ.get(ADDRESS_VARIABLE) or str(order["address"])  # the service may be on another node than this rank
    transfer = PeerTransfer(receiver, str(order["name"]), address, int(order["ranks"]), float(order["seconds"]))
    threading.Thread(target=transfer.run, name=transfer.channel.name, daemon=True).start()
    return {"digest": receiver.digest, "channel": transfer.channel.address.model_dump()}


class PeerTransfer:
    """One transfer, at one of the source's ranks, which are as many as the destination's. Raises BadMessage."""

    def __init__(self, receiver: Receiver, name: str, address: str, ranks: int, seconds: float) -> None:
        self._receiver, self._deadline, self._ranks = receiver, TransferDeadline(seconds), ranks
        self._version = receiver.version
        specs = [(name, known.dtype, known.shape) for name, known in receiver.known.items()]
        self._manifest = lay_out(specs, BUCKET_BYTES // ranks, "partial")
        self._copies = [self._held(bucket) for bucket in self._manifest.buckets]
        self.channel = GroupSender(name, address, 1 + ranks, receiver.device, paced=True)
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

    def _held(self, bucket: Bucket) -> list[TensorCopy]:
        """Returns the copies by which the bucket would be loaded. Where there is one rank, they are all of its bytes."""
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._receiver.device)
        copies = load_plan.held_copies(self._receiver.model, bucket, flat)
        held, wanted = sum(copy.target.numel() * copy.dtype.itemsize for copy in copies), sum(slot.nbytes for slot in bucket.slots)
        if self._ranks == 1 and held != wanted:
            first = bucket.slots[0].name
            raise BadMessage(f"of {wanted} bytes of weights from {first} on this engine holds {held} as they were pushed: it can send none")
        return copies

    @torch.inference_mode()
    def _send(self) -> None:
        channel, device = self.channel, self._receiver.device
        with on_stream(torch.cuda.Stream(device) if device.type == "cuda" else None):  # beside the engine's own
            channel.announce(self._version, self._manifest, self._deadline.left)
            for index, bucket in enumerate(self._manifest.buckets):
                flat = channel.buffer(index, bucket.nbytes)
                flat.zero_()
                for copy in self._copies[index]:
                    copy.source(flat).copy_(copy.target)
                channel.send(index, flat)
            channel.finish()
        channel.raise_if_broken()

    def _linger(self, seconds: float) -> None:
        """Keeps the store for as long as the destination may read it."""
        end = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and self.channel.store.add(PEER_DONE, 0) < self._ranks:
                time.sleep(POLL_INTERVAL_S)
