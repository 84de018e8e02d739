"""Snapshots of the weights on disk: for engines that read every version there, and for replicas that join late.

Rank 0 writes what all ranks gather, bucket by bucket; reading, packing and writing of one bucket run while the next is gathered. What
goes wrong on the disk never stops the training: the snapshot is given up, and the next one is whole.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.control_client import REQUEST_SECONDS, ControlClient, now
from services.trainer.megatron.export import Bucket, copy_beside_weights, write_config
from shared.bus.registry import BROKEN_SNAPSHOT
from shared.config.run_config import RunConfig
from shared.schema.messages import ServiceStatus, WeightsLive, WeightsSnapshot
from shared.transfer.snapshot import BrokenLink, SnapshotLink
from shared.transfer.snapshot_chain import Snapshots
from shared.transfer.snapshot_copy import LocalCopy
from shared.transfer.snapshot_draft import SnapshotDraft, Tensors
from shared.transfer.tensor_file import TensorFileBroken

CURRENT = ".current"
"""Where the version that was written last lies beside its links: what the next delta is made against."""

AHEAD = 2
"""Buckets in host memory at once: one is being written, one is being gathered."""

RETRY_SECONDS = 30.0
"""Pause after a snapshot that could not be written, and between two whole ones that a replica asked for in vain."""

_DISK = (OSError, BrokenLink, TensorFileBroken)


class SnapshotWriter:
    """All ranks construct it, and call `write` together.

    Args:
        link: of rank 0, None on the others.

    Attributes:
        instead_of_pushes: engines read every version from disk.
    """

    def __init__(self, config: RunConfig, link: ControlClient | None, actor: Actor) -> None:
        self._config, self._weights, self._link, self._actor = config, config.weights, link, actor
        self.instead_of_pushes = self._weights.update_weight_transport == "disk"
        self._log: Any = structlog.get_logger()
        if link is None:
            return
        self._snapshots = Snapshots.of(config)
        self._current = LocalCopy(self._snapshots.directory / CURRENT)
        self._written: int | None = None  # by this life
        self._not_before = 0.0
        self._asked: dict[str, tuple[float, float]] = {}  # instance → (version that it asked to be mended, when that was done)
        self._before: int | None = None  # by an earlier one, where this one has looked
        self._snapshot_of: dict[int, WeightsSnapshot] = {}  # of versions that may still go live
        self._told: tuple[int, frozenset[str]] = (-1, frozenset())

    # --- rank 0's part

    def due(self, version: int) -> bool:
        """Whether all ranks are to `write` this version, which the trainer holds."""
        if self._link is None or self._config.trainer.colocate or time.monotonic() < self._not_before:
            return False  # colocated engines lose their weights together, and get them together
        if self._wishes():
            return True
        if self.instead_of_pushes:
            return self._written != version
        interval = self._weights.snapshot_interval
        if not interval or self._written == version:
            return False
        if self._before is None:
            newest = self._snapshots.newest()
            self._before = newest.version if newest is not None and newest.version <= version else 0
        return version - (self._before if self._written is None else self._written) >= interval

    def tell_live(self) -> None:
        """Without pushes, replicas' cards alone say what is live: announces the newest of this life's versions that one of them serves."""
        link = self._link
        if not self.instead_of_pushes or link is None:
            return
        served = [card.version for card in link.replicas if card.version in self._snapshot_of]
        if not served:
            return
        newest = self._snapshot_of[max(served)]
        serving = frozenset(card.instance for card in link.replicas if card.version == newest.version)
        if (newest.version, serving) == self._told:
            return
        live = WeightsLive(
            version=newest.version, replicas=sorted(serving), seconds=newest.seconds, bytes=newest.bytes, digest=newest.digest, at=now()
        )
        link.weights_live(live)
        self._told = newest.version, serving
        self._snapshot_of = {version: written for version, written in self._snapshot_of.items() if version >= newest.version}

    def _wishes(self) -> list[ServiceStatus]:
        """Replicas that cannot have what is on disk, and have not been helped a while ago."""
        assert self._link is not None
        return [card for card in self._link.replicas if self._wishes_one(card)]

    def _wishes_one(self, card: ServiceStatus) -> bool:
        broken = card.gauges.get(BROKEN_SNAPSHOT, -1.0)
        asked, helped = self._asked.get(card.instance, (-1.0, 0.0))
        return broken >= 0 and (asked != broken or time.monotonic() > helped + RETRY_SECONDS)

    # --- all ranks' part

    @torch.no_grad()
    def write(self, version: int) -> WeightsSnapshot | None:
        """Writes the present weights as ``version`` and announces it. None on other ranks than 0, and where it could not be written."""
        buckets = self._actor.export(self._weights.update_weight_buffer_size, self._weights.update_weight_dtype)
        if self._link is None:
            for _ in buckets:
                pass
            return None
        started = time.monotonic()
        draft: SnapshotDraft | None = None
        try:
            draft = self._draft(version)
        except _DISK as error:
            failure: Exception | None = error
        else:
            failure = None
        with ThreadPoolExecutor(1, thread_name_prefix="snapshot") as writer:
            pending: deque[Future[None]] = deque()
            for bucket in buckets:  # to the end whatever happens: the other ranks take part in it
                if draft is not None and failure is None:
                    pending.append(writer.submit(draft.add, on_host(bucket)))
                while len(pending) >= AHEAD:
                    failure = failure or _failure(pending.popleft())
            for future in pending:
                failure = failure or _failure(future)
        if draft is not None and failure is None:
            try:
                return self._finish(draft.publish(self._beside), time.monotonic() - started)
            except _DISK as error:
                failure = error
        assert failure is not None
        self._fail(version, draft, failure)
        return None

    def _draft(self, version: int) -> SnapshotDraft:
        if self._written is None:
            self._snapshots.sweep()
        self._snapshots.forget_after(version)
        base = self._base(version)
        return SnapshotDraft(self._snapshots, version, base, self._weights.update_weight_delta_encoding)

    def _base(self, version: int) -> LocalCopy | None:
        """What a delta can lie on; None: a whole link is due."""
        if self._weights.update_weight_mode != "delta" or self._wishes():
            return None
        newest = self._snapshots.newest()
        held = self._current.held()
        if newest is None or held is None or newest.version >= version or (held.version, held.digest) != (newest.version, newest.digest):
            return None
        try:
            chain = self._snapshots.chain(newest.version)
            for link in chain:
                link.check_sizes()
        except BrokenLink as error:
            self._log.warning("snapshot_chain_broken", error=str(error))
            return None
        return self._current if len(chain) < self._weights.update_weight_full_interval else None

    def _beside(self, directory: Path) -> None:
        copy_beside_weights(self._actor.hf_dir, directory)
        write_config(directory, self._weights.update_weight_dtype or self._actor.settings.trainer.train_dtype)

    def _finish(self, written: SnapshotLink, seconds: float) -> WeightsSnapshot:
        assert self._link is not None
        snapshot = WeightsSnapshot(
            version=written.version,
            digest=written.digest,
            form=written.kind,
            path=str(written.path.absolute()),
            bytes=written.bytes,
            seconds=seconds,
            at=now(),
        )
        for card in self._wishes():
            self._asked[card.instance] = card.gauges[BROKEN_SNAPSHOT], time.monotonic()
        self._written, link = written.version, self._link
        self._snapshot_of[written.version] = snapshot
        bus, bucket = link.service.bus, link.service.subjects.weights_bucket
        link.call(bus.put(bucket, "snapshot", snapshot.encode(), deadline=REQUEST_SECONDS), REQUEST_SECONDS)
        try:
            if self._weights.update_weight_mode == "delta" and written.kind == "full":
                self._current.take(written)
            removed = self._snapshots.retain(self._weights.keep_snapshots)
        except OSError as error:  # the snapshot itself is there
            self._log.warning("snapshots_not_tidied", error=str(error))
            removed = []
        self._log.info(
            "snapshot_written",
            version=written.version,
            kind=written.kind,
            bytes=written.bytes,
            seconds=round(seconds, 3),
            removed=removed,
        )
        link.metrics({"snapshot_version": written.version, "snapshot_bytes": written.bytes, "snapshot_seconds": seconds})
        return snapshot

    def _fail(self, version: int, draft: SnapshotDraft | None, error: Exception) -> None:
        assert self._link is not None
        if draft is not None:
            draft.discard()
        self._not_before = time.monotonic() + RETRY_SECONDS
        self._log.error("snapshot_failed", version=version, error=f"{type(error).__name__}: {error}")
        self._link.tell("snapshot_failed", f"version {version} was not written to {self._snapshots.directory}: {error}")


def _failure(done: Future[None]) -> Exception | None:
    try:
        done.result()
    except _DISK as error:
        return error
    return None


def on_host(bucket: Bucket) -> Tensors:
    """The bucket's bytes in host memory; on a CPU where they lie."""
    tensors = {}
    for name, tensor in bucket:
        assert isinstance(tensor, Tensor)  # on rank 0
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        tensors[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat
    return tensors
