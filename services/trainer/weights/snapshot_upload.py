"""Uploads snapshots to the run's object store beside the training, and signs what replicas download.

The newest snapshot is uploaded with all that it is made of; what the store has is not sent again, so where uploads fall behind, versions in
between are sent as parts of the newer chain. A version is announced once all of it lies in the store. A replica gets URLs of the objects of
one index as long as it is in the registry: one that has left gets none, and those that it has expire. Objects go once neither the newest
index names them nor one for which a living replica has asked since it served a newer version.
"""

import threading
import time
from collections.abc import Callable, Mapping

from services.trainer.control_client import REQUEST_SECONDS, ControlClient
from shared.bus.registry import Registry
from shared.runtime.errors import ConfigError, DeadlineExceeded, MyxoError
from shared.runtime.tasks import SupervisedThread
from shared.runtime.telemetry import declare_metrics
from shared.schema.messages import Message
from shared.schema.weight_messages import ObjectUrls, ObjectUrlsRequest, WeightsSnapshot
from shared.store.s3 import ObjectStoreCredentials, S3Client
from shared.transfer.object_weights import ObjectPublisher
from shared.transfer.weight_checkpoint import BrokenCheckpoint, WeightCheckpoint

declare_metrics("""
    object_store_sent_total | bytes | uploaded to the object store | with update_weight_transport = s3
    object_store_seconds | s | that uploading the newest snapshot took | with update_weight_transport = s3
    object_store_behind | | snapshots written since the newest that is in the object store | with update_weight_transport = s3
""")

RETRY_SECONDS = 5.0  # the pause after an upload that failed


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
                self._client.publish_event("snapshot_not_uploaded", f"version {snapshot.version}: {error}; again in {RETRY_SECONDS:g} s")
                time.sleep(RETRY_SECONDS)
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
