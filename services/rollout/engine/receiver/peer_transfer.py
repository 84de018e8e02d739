"""Sends weights from engine to engine: a source that serves them sends its parameters, as they are in memory, to a destination.

Each rank sends to the same rank over a group of two, and the destination receives like a push. The source uses a thread of its own and goes
on generating, since it only reads. Both ends hash the sent tensors, one by one. In the end the source notes these digests and those of its
version's tensors, so that the destination knows the version's digest without having seen a tensor under its Hugging Face name.

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

from services.rollout.engine.receiver import load_plan
from services.rollout.engine.receiver.receiver import PEER_DONE, PEER_PROOF, Receiver, said_by
from shared.runtime.errors import BadMessage
from shared.transfer.bucket_hashing import ManifestHasher
from shared.transfer.bucket_ring import bucket_views
from shared.transfer.group_channel import GroupSender, on_stream
from shared.transfer.manifest import lay_out
from shared.transfer.weight_channel import POLL_INTERVAL_S, TransferDeadline

log = logging.getLogger(__name__)

BUCKET_BYTES = 128 * 1024**2

TRANSFERS = 2
"""The number of transfers that an engine sends at once: each takes two flat buffers of device memory, and a share of the link."""

LINGER_SECONDS = 20.0
BROKEN_LINGER_SECONDS = 2.0
"""The time that the source's store outlives a transfer, for a destination that has not read all of it, and an aborted transfer."""


def send_to_peer(receiver: Receiver, order: Mapping[str, Any], deadline: TransferDeadline) -> dict[str, Any]:
    """Begins to send ``version`` over a channel called ``name`` at ``address``, within ``seconds``. Answers with the channel.

    The destination receives it as push number ``version``.
    """
    if not receiver.known or receiver.version != int(order["version"]):
        raise BadMessage(f"version {order['version']} is not to be had here: this engine holds version {receiver.version}")
    if len(receiver.before_change) >= TRANSFERS:
        raise BadMessage(f"this engine sends to {TRANSFERS} others already")
    transfer = PeerTransfer(receiver, str(order["name"]), str(order["address"]), float(order["seconds"]))
    threading.Thread(target=transfer.run, name=transfer.channel.name, daemon=True).start()
    return {"digest": receiver.digest, "channel": transfer.channel.address.model_dump()}


class PeerTransfer:
    """One transfer, at the source."""

    def __init__(self, receiver: Receiver, name: str, address: str, seconds: float) -> None:
        self._receiver, self._deadline = receiver, TransferDeadline(seconds)
        self._version, self._known = receiver.version, dict(receiver.known)
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
        tensors = load_plan.tensors_of(self._receiver.model)
        specs = [(name, *spec) for name, spec in load_plan.specs_of(tensors).items()]
        manifest = lay_out(specs, BUCKET_BYTES, "parameters")
        hasher = ManifestHasher(manifest, device)
        with on_stream(torch.cuda.Stream(device) if device.type == "cuda" else None):  # beside the engine's own
            channel.announce(self._version, manifest, self._deadline.left)
            for index, bucket in enumerate(manifest.buckets):
                flat = channel.buffer(index, bucket.nbytes)
                for name, target in bucket_views(bucket, flat):
                    target.copy_(tensors[name])
                hasher.take(index, flat)
                channel.send(index, flat)
            channel.finish()
            sums = hasher.digests()
        channel.raise_if_broken()  # a tensor may have been read after it had begun to change
        channel.note(PEER_PROOF, json.dumps([self._known, sums]))

    def _linger(self, seconds: float) -> None:
        """Keeps the store for as long as the destination may read it."""
        end = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and not self.channel.store.check([PEER_DONE]):
                time.sleep(POLL_INTERVAL_S)
