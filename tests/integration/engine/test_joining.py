"""Replicas that help themselves to weights: from disk, whole and by deltas; from another engine that continues generating."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import GenerationRequest, Span
from services.rollout.replica import Replica
from services.rollout.served_version import NO_WEIGHTS
from services.rollout.weight_catch_up import WeightCatchUp
from services.rollout.weight_receiver import WeightsReceiver
from services.trainer.weights.snapshot_writer import WeightCheckpointWriter
from shared.bus import runs
from shared.bus.connection import Bus
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.tasks import cancelled
from shared.schema.weight_messages import WeightsLive, WeightsSnapshot
from shared.service.service_base import Service
from shared.transfer.tensor_file import TensorFiles
from shared.transfer.weight_checkpoint import LocalCheckpoint, WeightCheckpoint, WeightCheckpoints
from tests.integration.engine.conftest import Checkpoint, Checkpoints
from tests.integration.engine.load import LONG, SAMPLING, generating, prompts, weights_state
from tests.integration.engine.reference import log_probs
from tests.support.run_config import run_config
from tests.support.waiting import until

EXACT = 1e-5
SECONDS = 120


class Joiner(NamedTuple):
    """A replica with its service."""

    service: Service
    replica: Replica


NewReplica = Callable[[str, EngineClient], Awaitable[Joiner]]


@asynccontextmanager
async def a_run(
    nats: EmbeddedNats, valkey: EmbeddedValkey, name: str, directory: Path, model: Path, **weights: Any
) -> AsyncIterator[NewReplica]:
    """Makes a run and, on demand, its replicas: services around an engine each, which have no weights and look for some."""
    unhurried = {"registry_ttl": 600}  # nobody renews the statuses of these services
    config = run_config(directory, run={"name": name}, model={"hf_checkpoint": str(model)}, weights=weights, bus=unhurried)
    made: list[tuple[Service, list[asyncio.Task[None]]]] = []
    creator = await Bus.connect(nats.url, "test")
    await runs.create(creator, config, valkey.url)
    await creator.close()

    async def join(instance: str, client: EngineClient) -> Joiner:
        service = Service("rollout", instance, name, await Bus.connect(nats.url, instance), config, valkey.url)
        replica = Replica(service)
        pushes = WeightsReceiver(service, replica)
        catch_up = WeightCatchUp(service, replica, pushes.expects_push)
        await pushes.listen()
        await catch_up.listen()
        await replica.attach(client)
        made.append((service, [asyncio.create_task(catch_up.keep())]))
        return Joiner(service, replica)

    yield join
    for service, tasks in made:
        await cancelled(tasks)
        await service.store.close()
        await service.bus.close()


@pytest.fixture
async def replica(
    nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path, checkpoint: Checkpoints
) -> AsyncIterator[NewReplica]:
    """Makes replicas of the test's run, which is configured as `a_run` is by default."""
    async with a_run(nats, valkey, run_name, tmp_path, checkpoint(0).path) as make:
        yield make


def write(snapshots: WeightCheckpoints, version: int, checkpoint: Checkpoint, base: LocalCheckpoint | None = None) -> WeightCheckpoint:
    """A snapshot as a trainer writes it."""
    draft = WeightCheckpointWriter(snapshots, version, base)
    held = TensorFiles([checkpoint.path / "model.safetensors"])
    draft.add({name: (dtype, shape, held[name]) for name, (dtype, shape) in held.tensors.items()})
    return draft.publish(lambda path: [shutil.copy(file, path) for file in checkpoint.path.glob("*.json")] and None)


async def announce(service: Service, link: WeightCheckpoint) -> None:
    message = WeightsSnapshot(
        version=link.version, digest=link.digest, form=link.kind, path=str(link.path), bytes=link.bytes, seconds=0.1, at=time.time()
    )
    await service.bus.put(service.subjects.weights_bucket, "snapshot", message.encode())


async def serving(rollout: Joiner, version: int) -> None:
    async def looked() -> bool:
        return rollout.replica.serving and rollout.replica.version == version

    await until(looked, f"{rollout.service.instance} serves version {version}", SECONDS)


async def draws(client: EngineClient, checkpoint: Checkpoint, version: int) -> None:
    """Assert that new requests are drawn by this checkpoint and labelled with ``version``."""
    prompt = prompts(1)[0]
    (generation,) = await client.generate_group([GenerationRequest(prompt, 24, ignore_eos=True)], SAMPLING)
    assert generation.spans == (Span(0, 24, version),)
    assert np.abs(log_probs(checkpoint.model, prompt, generation.tokens) - generation.log_probs).max() < EXACT


@pytest.mark.timeout(900)
async def test_versions_from_disk(
    client: EngineClient, checkpoint: Checkpoints, nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path
) -> None:
    """A whole one, then a delta while requests run, then one that is damaged: found, told, and mended by a whole one."""
    snapshots, current = WeightCheckpoints(tmp_path / "weights" / run_name), LocalCheckpoint(tmp_path / "current")
    weights = {"update_weight_transport": "disk", "update_weight_mode": "delta", "update_weight_disk_dir": str(tmp_path / "weights")}
    async with a_run(nats, valkey, run_name, tmp_path, checkpoint(0).path, **weights) as replica:
        rollout = await replica("rollout-1", client)
        service = rollout.service
        first = write(snapshots, 1, checkpoint(1))
        current.copy_from(first)
        await announce(service, first)
        await serving(rollout, 1)
        await draws(client, checkpoint(1), 1)
        assert (await weights_state(client)).digest == first.digest

        second = write(snapshots, 2, checkpoint(2), current)
        assert second.kind == "delta"
        async with generating(client, 2, 3 * LONG) as running:  # they outlive the loading beside other work, too
            await announce(service, second)
            await serving(rollout, 2)
            for _, generation in await running.result():
                assert len(generation.tokens) == 3 * LONG and {span.version for span in generation.spans} == {1, 2}
        await draws(client, checkpoint(2), 2)
        assert (await weights_state(client)).digest == second.digest

        third = write(snapshots, 3, checkpoint(1), current)
        file = third.tensor_files()[0]
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        await announce(service, third)

        async def told() -> bool:
            cards = await service.registry.alive("rollout")
            return [card.gauges.get("broken_snapshot") for card in cards] == [3.0]

        await until(told, "that the snapshot is broken", SECONDS)
        assert rollout.replica.version == 2 and rollout.replica.serving
        await draws(client, checkpoint(2), 2)
        mended = write(snapshots, 3, checkpoint(1))
        assert mended.digest == third.digest
        await announce(service, mended)
        await serving(rollout, 3)
        await draws(client, checkpoint(1), 3)
        assert service.metrics.values["broken_snapshot"] == -1


@pytest.mark.timeout(900)
@pytest.mark.extra
async def test_weights_from_another_engine(
    client: EngineClient, overlapping_client: EngineClient, checkpoint: Checkpoints, replica: NewReplica
) -> None:
    """The source's requests run on as if nothing were; the joiner serves what it serves, and knows its digest."""
    known = TensorFiles([checkpoint(1).path / "model.safetensors"]).digests()
    source = await replica("rollout-1", client)
    gauges = source.service.metrics.values
    source.service.metrics.set("broken_snapshot", 4)  # it could not load one, and then gets a later version otherwise
    await client.update_weights_from_disk(str(checkpoint(1).path), 5)
    digest = await client.adopt(5, known)
    await source.replica.serve(5)
    await until(lambda: gauges["broken_snapshot"] == -1, "the end of the request for a whole snapshot", SECONDS)
    async with generating(client, 4) as running:
        joiner = await replica("rollout-2", overlapping_client)
        assert joiner.replica.version == NO_WEIGHTS
        live = WeightsLive(version=5, replicas=["rollout-1"], seconds=1.0, bytes=1, digest=digest, at=time.time())
        await joiner.service.bus.put(joiner.service.subjects.weights_bucket, "live", live.encode())
        await serving(joiner, 5)
        for _, generation in await running.result():
            assert generation.spans == (Span(0, LONG, 5),)
    await draws(overlapping_client, checkpoint(1), 5)
    assert (await weights_state(overlapping_client)).digest == digest
    cards = {card.instance: card.state for card in await joiner.service.registry.alive("rollout")}
    assert cards == {"rollout-1": "ready", "rollout-2": "ready"}
