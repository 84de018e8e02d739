"""Versions through an object store: the trainer's uploads and signatures, a replica's downloads, a real engine."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.rollout.engine.engine_client import EngineClient
from services.trainer.control_client import ControlClient
from services.trainer.weights.snapshot_writer import SnapshotUpload
from shared.bus.connection import RequestRefused
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey, free_port
from shared.schema.weight_messages import ObjectUrls, ObjectUrlsRequest, WeightsSnapshot
from shared.transfer.weight_checkpoint import LocalCheckpoint, WeightCheckpoint, WeightCheckpoints
from tests.chaos.link_proxy import EVERYBODY, LinkProxy, LinkState
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.load import weights_state
from tests.integration.engine.test_joining import a_run, draws, serving, write
from tests.support.object_store import RunningObjectStore, running_object_store, trainer_environment
from tests.support.waiting import until

SECONDS = 120.0


@pytest.fixture(scope="module")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningObjectStore]:
    with running_object_store(tmp_path_factory.mktemp("object-store")) as store:
        yield store


@asynccontextmanager
async def cuttable(store: RunningObjectStore) -> AsyncIterator[tuple[LinkProxy, str]]:
    """A link to the store that can be cut, and the bucket's URL over it."""
    _, _, server, bucket = store.url.split("/")
    port, (host, own) = free_port(), server.split(":")
    proxy = LinkProxy(("127.0.0.1", port), (host, int(own)))
    await proxy.open()
    yield proxy, f"http://127.0.0.1:{port}/{bucket}"
    proxy.close()


@pytest.mark.extra
@pytest.mark.timeout(900)
async def test_versions_from_an_object_store(
    client: EngineClient,
    checkpoint: Checkpoints,
    nats: EmbeddedNats,
    valkey: EmbeddedValkey,
    run_name: str,
    tmp_path: Path,
    object_store: RunningObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole one; a delta over a link that is cut meanwhile; one that the store has damaged, mended; and no URLs for who has left."""
    snapshots, current = WeightCheckpoints(tmp_path / "weights"), LocalCheckpoint(tmp_path / "current")
    trainer_environment(monkeypatch)
    for name, value in {"NATS_URL": nats.url, "REDIS_URL": valkey.url, "MYXO_RUN": run_name}.items():
        monkeypatch.setenv(name, value)
    async with cuttable(object_store) as (link, url):
        weights = {"update_weight_transport": "s3", "update_weight_mode": "delta", "object_store_url": url}
        async with a_run(nats, valkey, run_name, tmp_path, checkpoint(0).path, **weights) as replica:
            rollout = await replica("rollout-1", client)
            service = rollout.service
            await service.announce()
            control = ControlClient().__enter__()
            announced: list[WeightsSnapshot] = []

            def announce(snapshot: WeightsSnapshot) -> None:
                bus, bucket = control.service.bus, control.service.subjects.weights_bucket
                control.call(bus.put(bucket, "snapshot", snapshot.encode()), SECONDS)
                announced.append(snapshot)

            upload = await asyncio.to_thread(SnapshotUpload, control, snapshots.readable, announce)

            def offer(written: WeightCheckpoint, *, again: bool = False) -> None:
                made = {"form": written.kind, "path": str(written.path), "bytes": written.bytes, "seconds": 0.1, "at": written.at}
                upload.offer(WeightsSnapshot(version=written.version, digest=written.digest, **made), again=again)

            first = write(snapshots, 1, checkpoint(1))
            current.copy_from(first)
            offer(first)
            await serving(rollout, 1)
            await draws(client, checkpoint(1), 1)

            link.set(LinkState({EVERYBODY}))
            second = write(snapshots, 2, checkpoint(2), current)
            offer(second)
            await asyncio.sleep(3)
            assert [snapshot.version for snapshot in announced] == [1] and rollout.replica.version == 1 and rollout.replica.serving
            link.set(LinkState(set()))
            await serving(rollout, 2)
            await draws(client, checkpoint(2), 2)
            assert (await weights_state(client)).digest == second.digest

            third = write(snapshots, 3, checkpoint(3), current)
            store = object_store.client(run_name)
            before = set(store.listed())
            store_put, damage = upload._publisher.client.put, b"damaged"

            def damaging(key: str, data: bytes, deadline: float) -> None:
                store_put(key, damage if len(data) > 10_000 else data, deadline)

            monkeypatch.setattr(upload._publisher.client, "put", damaging)
            offer(third)

            async def reported() -> bool:
                return [status.gauges.get("broken_snapshot") for status in await service.registry.alive("rollout")] == [3.0]

            await until(reported, "that the version is broken", SECONDS)
            assert rollout.replica.version == 2 and rollout.replica.serving and set(store.listed()) - before
            monkeypatch.setattr(upload._publisher.client, "put", store_put)
            shutil.rmtree(third.path)
            mended = write(snapshots, 3, checkpoint(3))
            offer(mended, again=True)
            await serving(rollout, 3)
            await draws(client, checkpoint(3), 3)

            request = ObjectUrlsRequest(replica="rollout-1", index=announced[-1].index, objects=[announced[-1].index])
            subject = service.subjects.object_urls

            async def signed(request: ObjectUrlsRequest) -> ObjectUrls:
                return await service.bus.request(subject, request, ObjectUrls, deadline=SECONDS, awaited_from="trainer")

            assert "x-myxo-replica=rollout-1" in (await signed(request)).urls[0]
            with pytest.raises(RequestRefused, match="no object of index"):
                await signed(request.model_copy(update={"objects": ["../other"]}))
            await service.registry.leave(service.status())
            with pytest.raises(RequestRefused, match="not among the run's replicas, or has left"):
                await signed(request)
            await asyncio.to_thread(control.__exit__)
