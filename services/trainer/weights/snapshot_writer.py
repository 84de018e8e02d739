"""Writes snapshots of the weights to disk: for engines that read every version there, and for replicas that join late.

Rank 0 writes what all ranks gather, bucket by bucket; packing and writing of one bucket run while the next is gathered. An error of
the disk never stops the training: the snapshot is given up, and the next one is a whole one.
"""

import concurrent.futures
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.control_client import REQUEST_SECONDS, ControlClient, now
from services.trainer.megatron.export import copy_beside_weights, write_config
from services.trainer.megatron.gather_plan import Bucket
from shared.bus.registry import BROKEN_SNAPSHOT
from shared.config.run_config import RunConfig
from shared.runtime.telemetry import MetricSpec, declare_metrics
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import WeightsLive, WeightsSnapshot
from shared.transfer.local_checkpoint import LocalCheckpoint
from shared.transfer.tensor_file import TensorBytes, TensorFileBroken
from shared.transfer.weight_checkpoint import BrokenCheckpoint, WeightCheckpoint, WeightCheckpoints
from shared.transfer.weight_checkpoint_writer import WeightCheckpointWriter

declare_metrics(
    MetricSpec("snapshot_version", "version", "of the newest snapshot of weights on disk", when="once there is one"),
    MetricSpec("snapshot_bytes", "bytes", "its size: of a delta, what differs", when="once there is one"),
    MetricSpec("snapshot_seconds", "s", "that writing it took", when="once there is one"),
)

CURRENT = ".current"
"""The directory beside the versions that holds a copy of the one written last; the next delta is made against it."""

RETRY_SECONDS = 30.0
"""The pause after a snapshot that could not be written, and between whole snapshots for a replica that cannot load one."""

_DISK_ERRORS = (OSError, BrokenCheckpoint, TensorFileBroken)


class SnapshotWriter:
    """Writes the versions that are due. All ranks construct it and call `write` together.

    Args:
        link: rank 0's client; None on the other ranks.

    Attributes:
        instead_of_pushes: whether engines read every version from disk.
    """

    def __init__(self, config: RunConfig, link: ControlClient | None, actor: Actor) -> None:
        self._config, self._weights, self._client, self._actor = config, config.weights, link, actor
        self.instead_of_pushes = self._weights.update_weight_transport == "disk"
        self._log: Any = structlog.get_logger()
        if link is None:
            return
        self._checkpoints = WeightCheckpoints.of_run(config)
        self._current = LocalCheckpoint(self._checkpoints.directory / CURRENT)
        self._writer: WeightCheckpointWriter | None = None
        self._written: int | None = None  # written by this process
        self._counted_from: int | None = None  # the version that the interval counts from
        self._not_before = 0.0
        self._helped: dict[str, tuple[float, float]] = {}  # instance → (broken version that it reported, time of the whole one)
        self._snapshot_of: dict[int, WeightsSnapshot] = {}  # the snapshots of versions that may still go live
        self._announced: tuple[int, frozenset[str]] = (-1, frozenset())

    # --- rank 0's part

    def due(self, version: int) -> bool:
        """Returns whether all ranks are to `write` this version, which the trainer holds."""
        if self._client is None or self._config.trainer.colocate or time.monotonic() < self._not_before:
            return False  # colocated engines lose their weights together, and get them together
        if self._replicas_to_help():
            return True
        if self.instead_of_pushes:
            return self._written != version
        if not self._weights.snapshot_interval:
            return False
        if self._counted_from is None:
            newest = self._checkpoints.newest()
            self._counted_from = newest.version if newest is not None and newest.version <= version else 0
        return version - self._counted_from >= self._weights.snapshot_interval

    def tell_live(self) -> None:
        """Announces the newest of this process's versions that a replica serves. Without pushes, only statuses show which is live."""
        client = self._client
        if not self.instead_of_pushes or client is None:
            return
        served = [status.version for status in client.replicas if status.version in self._snapshot_of]
        if not served:
            return
        newest = self._snapshot_of[max(served)]
        serving = frozenset(status.instance for status in client.replicas if status.version == newest.version)
        if (newest.version, serving) == self._announced:
            return
        live = WeightsLive(
            version=newest.version, replicas=sorted(serving), seconds=newest.seconds, bytes=newest.bytes, digest=newest.digest, at=now()
        )
        client.weights_live(live)
        self._announced = newest.version, serving
        self._snapshot_of = {version: written for version, written in self._snapshot_of.items() if version >= newest.version}

    def _replicas_to_help(self) -> list[ServiceStatus]:
        """Returns the replicas that cannot load the snapshot on disk, and for which no whole one was written lately."""
        assert self._client is not None
        return [status for status in self._client.replicas if self._needs_help(status)]

    def _needs_help(self, status: ServiceStatus) -> bool:
        broken = status.gauges.get(BROKEN_SNAPSHOT, -1.0)
        reported, helped_at = self._helped.get(status.instance, (-1.0, 0.0))
        return broken >= 0 and (reported != broken or time.monotonic() > helped_at + RETRY_SECONDS)

    # --- all ranks' part

    @torch.no_grad()
    def write(self, version: int) -> WeightsSnapshot | None:
        """Writes the present weights as ``version`` and announces it. Returns None on ranks other than 0, and if writing failed."""
        exported = self._actor.export(self._weights.update_weight_buffer_size, self._weights.update_weight_dtype)
        if self._client is None:
            for _ in exported:
                pass
            return None
        started = time.monotonic()
        with ThreadPoolExecutor(1, thread_name_prefix="snapshot") as thread:
            writing = thread.submit(self._begin, version)
            for bucket in exported:  # to its end, even after an error: the other ranks take part in gathering it
                tensors = on_host(bucket)
                concurrent.futures.wait([writing])  # one bucket is being written while the next is gathered
                if writing.exception() is None:
                    writing = thread.submit(writing.result().add, tensors)
        try:
            written = writing.result().publish(self._write_beside)
        except _DISK_ERRORS as error:
            self._fail(version, error)
            return None
        return self._finish(written, time.monotonic() - started)

    def _begin(self, version: int) -> WeightCheckpointWriter:
        self._writer = None
        if self._written is None:
            self._checkpoints.sweep()
        self._checkpoints.remove_after(version)
        encoding = self._weights.update_weight_delta_encoding
        self._writer = WeightCheckpointWriter(self._checkpoints, version, self._base(version), encoding)
        return self._writer

    def _base(self, version: int) -> LocalCheckpoint | None:
        """Returns the checkpoint that a delta can be based on, or None if a whole checkpoint is due."""
        if self._weights.update_weight_mode != "delta" or self._replicas_to_help():
            return None
        newest, held = self._checkpoints.newest(), self._current.held()
        if newest is None or held is None or newest.version >= version or held.id != newest.id:
            return None
        try:
            chain = self._checkpoints.chain(newest.version)
            for checkpoint in chain:
                checkpoint.check_files(contents=False)
        except BrokenCheckpoint as error:
            self._log.warning("snapshot_chain_broken", error=str(error))
            return None
        return self._current if len(chain) < self._weights.update_weight_full_interval else None

    def _write_beside(self, directory: Path) -> None:
        copy_beside_weights(self._actor.hf_dir, directory)
        write_config(directory, self._weights.update_weight_dtype or self._actor.settings.trainer.train_dtype)

    def _finish(self, written: WeightCheckpoint, seconds: float) -> WeightsSnapshot:
        """Announces the snapshot, and removes those that are not needed any more."""
        client = self._client
        assert client is not None
        snapshot = WeightsSnapshot(
            version=written.version,
            digest=written.digest,
            form=written.kind,
            path=str(written.path.absolute()),
            bytes=written.bytes,
            seconds=seconds,
            at=now(),
        )
        for status in self._replicas_to_help():
            self._helped[status.instance] = status.gauges[BROKEN_SNAPSHOT], time.monotonic()
        self._writer, self._written, self._counted_from = None, written.version, written.version
        self._snapshot_of[written.version] = snapshot
        bus, bucket = client.service.bus, client.service.subjects.weights_bucket
        client.call(bus.put(bucket, "snapshot", snapshot.encode(), deadline=REQUEST_SECONDS), REQUEST_SECONDS)
        removed: list[int] = []
        try:
            if self._weights.update_weight_mode == "delta" and written.kind == "full":
                self._current.copy_from(written)
            removed = self._checkpoints.retain(self._weights.keep_snapshots)
        except OSError as error:  # the snapshot itself is complete
            self._log.warning("snapshots_not_tidied", error=str(error))
        figures = {"version": written.version, "kind": written.kind, "bytes": written.bytes, "seconds": round(seconds, 3)}
        self._log.info("snapshot_written", **figures, removed=removed)
        client.gauges({"snapshot_version": written.version, "snapshot_bytes": written.bytes, "snapshot_seconds": seconds}, in_status=False)
        return snapshot

    def _fail(self, version: int, error: Exception) -> None:
        assert self._client is not None
        if self._writer is not None:
            self._writer.discard()
        self._not_before = time.monotonic() + RETRY_SECONDS
        self._log.error("snapshot_failed", version=version, error=f"{type(error).__name__}: {error}")
        self._client.tell("snapshot_failed", f"version {version} was not written to {self._checkpoints.directory}: {error}")


def on_host(bucket: Bucket) -> dict[str, TensorBytes]:
    """Returns the bucket's bytes in host memory; on a CPU without a copy."""
    tensors = {}
    for name, tensor in bucket:
        assert isinstance(tensor, Tensor)  # not None on rank 0
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        tensors[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat
    return tensors
