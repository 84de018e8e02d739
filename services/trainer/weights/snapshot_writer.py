"""Writes snapshots of the weights to disk: for engines that read every version there, and for replicas that join late.

Rank 0 writes what all ranks gather, bucket by bucket; packing and writing of one bucket run while the next is gathered. An error of the
disk never stops the training: the snapshot is given up, and the next one is a whole one.

With an object store the newest snapshot is uploaded beside the training with all that it is made of; what the store has is not sent again,
so where uploads fall behind, versions in between are sent as parts of the newer chain. A version is announced once all of it lies in the
store. A replica gets URLs of the objects of one index as long as it is in the registry: one that has left gets none, and those that it has
expire. Objects go once neither the newest index names them nor one for which a living replica has asked since it served a newer version.
"""

import concurrent.futures
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import structlog
import torch
from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.control_client import REQUEST_SECONDS, ControlClient
from services.trainer.parallel.export import copy_beside_weights, write_config
from services.trainer.parallel.gather_plan import Bucket
from shared.bus.registry import BROKEN_SNAPSHOT, Registry
from shared.config.run_config import RunConfig
from shared.model.hf_checkpoint import INDEX
from shared.model.quantization import Quantization
from shared.runtime.errors import ConfigError, DeadlineExceeded, MyxoError
from shared.runtime.safe_files import fsync_tree, publish, scratch
from shared.runtime.tasks import SupervisedThread
from shared.runtime.telemetry import declare_metrics
from shared.schema.messages import Message
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import ObjectUrls, ObjectUrlsRequest, WeightsLive, WeightsSnapshot
from shared.store.s3 import ObjectStoreCredentials, S3Client
from shared.transfer import digest, tensor_file
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.manifest import ITEM_BYTES
from shared.transfer.object_weights import ObjectPublisher
from shared.transfer.quantizer import sent
from shared.transfer.tensor_file import HASH_THREADS, TensorBytes, TensorFileBroken
from shared.transfer.weight_checkpoint import (
    BrokenCheckpoint,
    DeltaEncoding,
    FileSum,
    LocalCheckpoint,
    WeightCheckpoint,
    WeightCheckpoints,
    encode_delta,
)


class WeightCheckpointWriter:
    """Writes ``version``: a whole checkpoint, or with a ``base`` a delta on the version that lies there.

    Args:
        base: it becomes a copy of the new version, tensor by tensor; None for a whole checkpoint.
    """

    def __init__(
        self, checkpoints: WeightCheckpoints, version: int, base: LocalCheckpoint | None = None, encoding: DeltaEncoding = "auto"
    ) -> None:
        self._path, self._version, self._base, self._encoding = checkpoints.path_of(version), version, base, encoding
        self._tensors: dict[str, TensorDigest] = {}
        self._files: list[list[str]] = []  # the names in each file
        self._threads = ThreadPoolExecutor(HASH_THREADS)
        self._before: WeightCheckpoint | None = None
        if base is not None:
            self._before = base.held()
            assert self._before is not None  # callers have looked
            self._base_draft, self._held = base.begin_change()
        self._draft = scratch(self._path)

    def add(self, tensors: Mapping[str, TensorBytes]) -> Self:
        """Writes one bucket, whose bytes are read before this returns. Returns the writer.

        Raises:
            OSError: the disk refused. BrokenCheckpoint: the base does not have one of the tensors.
        """
        entries: dict[str, TensorBytes] = {}
        for name, (known, made) in zip(tensors, self._threads.map(self._entries, tensors, tensors.values()), strict=True):
            self._tensors[name] = known
            entries.update(made)
        if entries:
            tensor_file.write(self._shard(len(self._files)), entries)
            self._files.append(list(entries))
        return self

    def publish(self, write_beside: Callable[[Path], None] = lambda _: None) -> WeightCheckpoint:
        """Makes the checkpoint appear, complete.

        Args:
            write_beside: writes what a whole checkpoint holds besides weights (config, tokenizer) into its directory.

        Raises:
            OSError: the disk refused. BrokenCheckpoint: a tensor of the base has not been added.
        """
        if self._before is None:
            write_beside(self._draft)
        elif missing := self._before.tensors.keys() - self._tensors.keys():
            raise BrokenCheckpoint(self._version, self._draft, f"{min(missing)} has not come")
        self._name_files("model" if self._before is None else "delta")
        described = WeightCheckpoint(
            path=self._draft,
            version=self._version,
            digest=version_digest(self._tensors),
            tensors=self._tensors,
            files={file.name: FileSum.read(file) for file in sorted(self._draft.iterdir()) if file.is_file()},
            base=None if self._before is None else self._before.id,
            at=time.time(),
        )
        described.save()
        fsync_tree(self._draft)
        publish(self._draft, self._path)
        self._threads.shutdown()
        if self._base is not None:
            self._base.finish_change(self._base_draft, described)
        return described.model_copy(update={"path": self._path})

    def discard(self) -> None:
        """Removes the unfinished checkpoint and, with it, the base."""
        self._threads.shutdown()
        shutil.rmtree(self._draft, ignore_errors=True)
        if self._base is not None:
            self._base.clear()

    def _entries(self, name: str, tensor: TensorBytes) -> tuple[TensorDigest, dict[str, TensorBytes]]:
        dtype, shape, data = tensor
        known = TensorDigest(dtype, shape, digest.of_bytes(data))
        if self._before is None:
            return known, {name: tensor}
        before = self._before.tensors.get(name)
        if before is None or (before.dtype, before.shape) != (dtype, shape):
            reason = f"{name} is not in version {self._before.version}, or of another dtype or shape"
            raise BrokenCheckpoint(self._version, self._draft, reason)
        if before == known:
            return known, {}
        old = self._held[name]
        parts = encode_delta(old, data, ITEM_BYTES[dtype], self._encoding)
        old[:] = data
        return known, {f"{part}/{name}": ("uint8", packed.shape, packed) for part, packed in parts.items()}

    def _name_files(self, stem: str) -> None:
        count, weight_map = len(self._files), dict[str, str]()
        for index, names in enumerate(self._files):
            file = f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"
            self._shard(index).rename(self._draft / file)
            weight_map.update(dict.fromkeys(names, file))
        if stem == "model" and count > 1:
            size = sum(math.prod(known.shape) * ITEM_BYTES[known.dtype] for known in self._tensors.values())
            content = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (self._draft / INDEX).write_text(json.dumps(content, indent=2) + "\n")

    def _shard(self, index: int) -> Path:
        return self._draft / f".shard-{index}"


declare_metrics("""
    snapshot_version | version | of the newest snapshot of weights on disk | once there is one
    snapshot_bytes | bytes | its size: of a delta, what differs | once there is one
    snapshot_seconds | s | that writing it took | once there is one
""")

BRIDGES = ".bridges"  # the directory beside the versions that holds deltas to those that are whole, for replicas that hold the one before
CURRENT = ".current"  # the directory beside the versions that holds a copy of the one written last; the next delta is made against it
RETRY_SECONDS = 30.0  # the pause after a snapshot that could not be written, and between whole snapshots for a replica that cannot load one
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
        self.instead_of_pushes = config.engines_read_snapshots
        self._log: Any = structlog.get_logger()
        if link is None:
            return
        self._checkpoints = WeightCheckpoints.of_run(config)
        self._current = LocalCheckpoint(self._checkpoints.directory / CURRENT)
        self._bridges = WeightCheckpoints(self._checkpoints.directory / BRIDGES)
        self._writers: list[WeightCheckpointWriter] = []
        self._upload = None
        if self._weights.update_weight_transport == "s3":
            self._upload = SnapshotUpload(link, lambda: [*self._checkpoints.readable(), *self._bridges.readable()], self._announce)
        self._helping = False  # whether the version that is being written is for a replica that cannot load one
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
        at = time.time()
        live = WeightsLive(
            version=newest.version, replicas=sorted(serving), seconds=newest.seconds, bytes=newest.bytes, digest=newest.digest, at=at
        )
        client.weights_live(live)
        self._announced = newest.version, serving
        self._snapshot_of = {version: written for version, written in self._snapshot_of.items() if version >= newest.version}

    def _replicas_to_help(self) -> list[ServiceStatus]:
        """Returns the replicas that cannot load the snapshot on disk, and for which no whole one was written lately."""
        assert self._client is not None
        found = []
        for status in self._client.replicas:
            broken = status.gauges.get(BROKEN_SNAPSHOT, -1.0)
            reported, helped_at = self._helped.get(status.instance, (-1.0, 0.0))
            if broken >= 0 and (reported != broken or time.monotonic() > helped_at + RETRY_SECONDS):
                found.append(status)
        return found

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
                tensors = on_host(bucket, self._actor.quantization)
                concurrent.futures.wait([writing])  # one bucket is being written while the next is gathered
                if writing.exception() is None:
                    writing = thread.submit(lambda writers, part: [one.add(part) for one in writers], writing.result(), tensors)
        try:
            written, *_ = [writer.publish(self._write_beside) for writer in reversed(writing.result())][::-1]
        except _DISK_ERRORS as error:
            self._fail(version, error)
            return None
        return self._finish(written, time.monotonic() - started)

    def _begin(self, version: int) -> list[WeightCheckpointWriter]:
        self._writers = []
        for checkpoints in (self._checkpoints, self._bridges):
            if self._written is None:
                checkpoints.sweep()
            checkpoints.remove_after(version - (checkpoints is self._bridges))
        encoding, self._helping = self._weights.update_weight_delta_encoding, bool(self._replicas_to_help())
        base, whole = self._base(version)
        self._writers = [WeightCheckpointWriter(self._checkpoints, version, None if whole else base, encoding)]
        if whole and base is not None and self._upload is not None:
            self._writers.append(WeightCheckpointWriter(self._bridges, version, base, encoding))
        return self._writers

    def _base(self, version: int) -> tuple[LocalCheckpoint | None, bool]:
        """Returns the checkpoint that a delta can be based on, if there is one, and whether a whole checkpoint is due."""
        if self._weights.update_weight_mode != "delta" or self._helping:
            return None, True
        newest, held = self._checkpoints.newest(), self._current.held()
        if newest is None or held is None or newest.version >= version or held.id != newest.id:
            return None, True
        try:
            chain = self._checkpoints.chain(newest.version)
            for checkpoint in chain:
                checkpoint.check_files(contents=False)
        except BrokenCheckpoint as error:
            self._log.warning("snapshot_chain_broken", error=str(error))
            return None, True
        return self._current, len(chain) >= self._weights.update_weight_full_interval

    def _write_beside(self, directory: Path) -> None:
        copy_beside_weights(self._actor.hf_dir, directory)
        found, architecture = self._actor.quantization, self._actor.model.architecture
        dtype = self._weights.update_weight_dtype or self._actor.settings.trainer.train_dtype
        write_config(directory, dtype, architecture.trained_drafts > 0, None if found is None else found.entry)

    def _finish(self, written: WeightCheckpoint, seconds: float) -> WeightsSnapshot:
        client = self._client
        assert client is not None
        snapshot = WeightsSnapshot(
            version=written.version,
            digest=written.digest,
            form=written.kind,
            path=str(written.path.absolute()),
            bytes=written.bytes,
            seconds=seconds,
            at=time.time(),
        )
        for status in self._replicas_to_help():
            self._helped[status.instance] = status.gauges[BROKEN_SNAPSHOT], time.monotonic()
        self._writers, self._written, self._counted_from = [], written.version, written.version
        self._snapshot_of[written.version] = snapshot
        if self._upload is None:
            self._announce(snapshot)
        removed: list[int] = []
        try:
            if self._weights.update_weight_mode == "delta" and ((held := self._current.held()) is None or held.id != written.id):
                self._current.copy_from(written)
            removed = self._checkpoints.retain(self._weights.keep_snapshots)
            self._bridges.remove_before(min(self._checkpoints.versions(), default=0))
        except OSError as error:  # the snapshot itself is complete
            self._log.warning("snapshots_not_tidied", error=str(error))
        figures = {"version": written.version, "kind": written.kind, "bytes": written.bytes, "seconds": round(seconds, 3)}
        self._log.info("snapshot_written", **figures, removed=removed)
        if self._upload is not None:
            self._upload.offer(snapshot, again=self._helping)
        client.gauges({"snapshot_version": written.version, "snapshot_bytes": written.bytes, "snapshot_seconds": seconds}, in_status=False)
        return snapshot

    def _announce(self, snapshot: WeightsSnapshot) -> None:
        assert self._client is not None
        bus, bucket = self._client.service.bus, self._client.service.subjects.weights_bucket
        self._client.call(bus.put(bucket, "snapshot", snapshot.encode(), deadline=REQUEST_SECONDS), REQUEST_SECONDS)

    def _fail(self, version: int, error: Exception) -> None:
        assert self._client is not None
        for writer in self._writers:
            writer.discard()
        self._not_before = time.monotonic() + RETRY_SECONDS
        self._log.error("snapshot_failed", version=version, error=f"{type(error).__name__}: {error}")
        self._client.publish_event("snapshot_failed", f"version {version} was not written to {self._checkpoints.directory}: {error}")


def on_host(bucket: Bucket, quantization: Quantization | None = None) -> dict[str, TensorBytes]:
    """Returns the bucket's bytes in host memory, quantized as the engines' checkpoint is; on a CPU without a copy."""
    tensors = {}
    for whole, given in bucket:
        assert isinstance(given, Tensor)  # not None on rank 0
        for name, tensor in sent(quantization, whole, given.detach()):
            flat = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
            tensors[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat
    return tensors


declare_metrics("""
    object_store_sent_total | bytes | uploaded to the object store | with update_weight_transport = s3
    object_store_seconds | s | that uploading the newest snapshot took | with update_weight_transport = s3
    object_store_behind | | snapshots written since the newest that is in the object store | with update_weight_transport = s3
""")

UPLOAD_RETRY_SECONDS = 5.0  # the pause after an upload that failed


class SnapshotUpload:
    """Rank 0's uploads and signatures.

    Args:
        checkpoints: returns those to be in the store, on any thread. announced: called with each snapshot that is there.
    """

    def __init__(
        self, client: ControlClient, checkpoints: Callable[[], list[WeightCheckpoint]], announced: Callable[[WeightsSnapshot], None]
    ) -> None:
        self._client, self._weights = client, client.config.weights
        self._checkpoints, self._announced = checkpoints, announced
        store = S3Client(self._weights.objects(client.service.run), ObjectStoreCredentials.of())
        self._publisher = ObjectPublisher(store, self._weights.object_store_connections, self._weights.push_timeout)
        try:
            store.probe()
        except ConfigError as error:
            if not isinstance(error.__cause__, DeadlineExceeded):  # one that is away may come back
                raise
            client.service.log.warning("object_store_away", error=str(error))
        self._store, self._read = store, dict[str, tuple[str, float]]()  # instance → the index that it follows, and until when at least
        self._versions = dict[str, int]()  # index → its version
        self._pending: tuple[WeightsSnapshot, bool] | None = None
        self._offered, self._behind = threading.Condition(), 0
        subject = client.service.subjects.object_urls
        client.call(client.service.bus.serve(subject, ObjectUrlsRequest, self._sign), REQUEST_SECONDS)
        SupervisedThread(self._run, "snapshot-upload").start()

    def offer(self, snapshot: WeightsSnapshot, *, again: bool) -> None:
        """Has a snapshot that lies on disk uploaded. ``again``: with what is in the store already, since a replica found it damaged."""
        with self._offered:
            again |= self._pending is not None and self._pending[1]
            self._pending, self._behind = (snapshot, again), self._behind + 1
            self._offered.notify()
        self._client.gauges({"object_store_behind": self._behind}, in_status=False)

    async def _sign(self, request: ObjectUrlsRequest) -> Message:
        instance, known = request.replica, self._publisher.indices.get(request.index)
        alive = {status.instance for status in await self._registry.alive("rollout") if status.state != "stopping"}
        if instance not in alive:
            raise MyxoError(f"no URLs for {instance}: it is not among the run's replicas, or has left")
        if known is None:
            raise MyxoError(f"index {request.index} is no longer in the object store; follow the newest announcement")
        if foreign := [name for name in request.objects if name not in known]:
            raise MyxoError(f"{foreign[0]!r} is no object of index {request.index}")
        seconds = self._weights.object_store_url_timeout
        self._read[instance] = request.index, time.monotonic() + seconds
        urls = [self._store.url(name, seconds, query={"x-myxo-replica": instance}) for name in request.objects]
        return ObjectUrls(urls=urls, seconds=seconds)

    @property
    def _registry(self) -> Registry:
        return self._client.service.registry

    def _run(self) -> None:
        while True:
            with self._offered:
                while self._pending is None:
                    self._offered.wait()
                (snapshot, again), self._pending, covered = self._pending, None, self._behind
            try:
                self._upload(snapshot, again)
            except (MyxoError, OSError, BrokenCheckpoint) as error:
                self._client.service.log.error("snapshot_not_uploaded", version=snapshot.version, error=str(error))
                self._client.publish_event(
                    "snapshot_not_uploaded", f"version {snapshot.version}: {error}; again in {UPLOAD_RETRY_SECONDS:g} s"
                )
                time.sleep(UPLOAD_RETRY_SECONDS)
                with self._offered:
                    self._pending = (self._pending or (snapshot, False))[0], again or (self._pending is not None and self._pending[1])
                continue
            with self._offered:
                self._behind -= covered
            self._client.gauges({"object_store_behind": self._behind}, in_status=False)

    def _upload(self, snapshot: WeightsSnapshot, again: bool) -> None:
        started, checkpoints = time.monotonic(), [found for found in self._checkpoints() if found.version <= snapshot.version]
        if all(found.id != (snapshot.version, snapshot.digest) for found in checkpoints):
            return  # a newer one has taken its place, and is offered
        index = self._publisher.publish(checkpoints, again=again)
        self._versions[index.name] = snapshot.version
        self._announced(snapshot.model_copy(update={"index": index.name, "index_bytes": index.bytes}))
        removed, seconds = self._publisher.collect(self._followed()), time.monotonic() - started
        self._client.service.metrics.add("object_store_sent", index.sent)
        self._client.gauges({"object_store_seconds": seconds}, in_status=False)
        figures = {"version": snapshot.version, "bytes": index.sent, "seconds": round(seconds, 3), "removed": removed}
        self._client.service.log.info("snapshot_uploaded", **figures)

    def _followed(self) -> set[str]:
        """Returns the indices that replicas still follow: living ones that serve an older version, and all whose URLs still hold."""
        serving: Mapping[str, int] = {status.instance: status.version for status in self._client.replicas}
        now, self._read = time.monotonic(), dict(self._read)
        self._read = {
            instance: (index, until)
            for instance, (index, until) in self._read.items()
            if now < until or serving.get(instance, 1 << 62) < self._versions.get(index, -1)
        }
        return {index for index, _ in self._read.values()}
