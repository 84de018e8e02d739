"""Real engines for this suite, the models that they are given, and clients that find them as they were."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess, FlagValue, engine_command
from services.rollout.rollout_service import Rollout
from shared.bus import runs
from shared.bus.connection import Bus
from shared.config import devices
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey, free_port
from shared.runtime.tasks import cancelled
from shared.service.service_base import Service
from shared.store.payload_store import Store
from tests.integration.engine.bench import Bench, NewBench
from tests.integration.engine.hall import CHUNK, Hall, NewHall
from tests.integration.engine.load import asked
from tests.support import agents
from tests.support.run_config import run_config
from tests.support.service_process import ROOT
from tests.support.tiny_model import TinyModelShape, write_tiny_model

START_SECONDS = 280.0
"""An engine starts in 15 s on two idle cores, and in minutes where a dozen processes share them."""

SMALL_TOKENS = 2000


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory and the model in it, float32."""

    path: Path
    model: Qwen3ForCausalLM


Checkpoints = Callable[[int], Checkpoint]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """``checkpoint(seed)``: one of several models of the same shape."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[int, Checkpoint] = {}

    def make(seed: int) -> Checkpoint:
        if seed not in made:
            path = root / str(seed)
            made[seed] = Checkpoint(path, write_tiny_model(path, seed=seed, shape=TinyModelShape(max_positions=2048)))
        return made[seed]

    return make


@contextmanager
def running_engine(model: Path, directory: Path, flags: dict[str, FlagValue]) -> Iterator[EngineProcess]:
    command = engine_command(model, free_port(), device="cpu", random_seed=1, flags=flags)
    process = EngineProcess(command, directory / "engine.log")
    try:
        asyncio.run(process.ready(START_SECONDS))
        yield process
    finally:
        process.stop(0)


@asynccontextmanager
async def fresh_client(engine: EngineProcess, checkpoint: Checkpoint) -> AsyncIterator[EngineClient]:
    """A client of an engine that is idle, not paused, and serves ``checkpoint`` as version 0."""
    async with await EngineClient.connect(engine.receiver) as client:
        await client.abort_all()
        await client.resume()
        await client.open_receivers()
        await client.update_weights_from_disk(str(checkpoint.path), 0)
        await asked(client, "POST", "/flush_cache")
        yield client


@pytest.fixture(scope="session")
def engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine with the flags that a run gets by default, but for the prefix cache, which engines on GPUs have."""
    flags: dict[str, FlagValue] = {"disable-radix-cache": False}
    with running_engine(checkpoint(0).path, tmp_path_factory.mktemp("engine"), flags) as process:
        yield process


@pytest.fixture(scope="session")
def plain_engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine with the flags that a run gets by default on a CPU: it keeps no prefixes, as runs with ``retract`` do not."""
    with running_engine(checkpoint(0).path, tmp_path_factory.mktemp("plain"), {}) as process:
        yield process


@pytest.fixture(scope="session")
def small_engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine with room for the keys and values of `SMALL_TOKENS` alone, which takes requests as if they were short."""
    flags: dict[str, FlagValue] = {"max-total-tokens": SMALL_TOKENS, "schedule-conservativeness": 0.1}
    with running_engine(checkpoint(0).path, tmp_path_factory.mktemp("small"), flags) as process:
        yield process


@pytest.fixture
def engine_name() -> str:
    """The fixture with the engine of ``client``, and so of benches and halls; a test that takes another one is parametrized with it."""
    return "engine"


@pytest.fixture
def chosen_engine(engine_name: str, request: pytest.FixtureRequest) -> EngineProcess:
    """The engine of that name."""
    found = request.getfixturevalue(engine_name)
    assert isinstance(found, EngineProcess)
    return found


@pytest.fixture
async def client(chosen_engine: EngineProcess, checkpoint: Checkpoints) -> AsyncIterator[EngineClient]:
    """A client of an engine, which serves ``checkpoint(0)``."""
    async with fresh_client(chosen_engine, checkpoint(0)) as client:
        yield client


@pytest.fixture(scope="session")
def overlapping_engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine with the flags that a run gets by default, but for overlapped steps, which engines on GPUs have."""
    flags: dict[str, FlagValue] = {"disable-overlap-schedule": False}
    with running_engine(checkpoint(0).path, tmp_path_factory.mktemp("overlapping"), flags) as process:
        yield process


@pytest.fixture
async def overlapping_client(overlapping_engine: EngineProcess, checkpoint: Checkpoints) -> AsyncIterator[EngineClient]:
    """A client of ``overlapping_engine``, which serves ``checkpoint(0)``."""
    async with fresh_client(overlapping_engine, checkpoint(0)) as client:
        yield client


@pytest.fixture
async def new_bench(
    client: EngineClient, checkpoint: Checkpoints, nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path
) -> AsyncIterator[NewBench]:
    """Makes the test's run, with config sections laid over the smallest config, and its rollout service, which serves version 0."""
    bus, store = await Bus.connect(nats.url, "test"), Store(valkey.url, run_name)
    made: list[Bench] = []

    async def make(instance: str = "rollout-1", **sections: dict[str, Any]) -> Bench:
        sections.setdefault("model", {"hf_checkpoint": str(checkpoint(0).path)})
        config = run_config(tmp_path, run={"name": run_name}, **sections)
        await runs.create(bus, config, valkey.url)
        service = Service("rollout", instance, run_name, bus, devices.engine_of(config, instance)[1], valkey.url)
        rollout = Rollout(service)
        await rollout.start_functions()
        await rollout.weights.listen()
        await rollout.replica.attach(client)
        await rollout.replica.serve(0)
        made.append(Bench(service, rollout, client))
        return made[-1]

    yield make
    for one in made:
        await cancelled(one.working)
        await cancelled(one.rollout.running)
        await one.rollout.close_functions()
        await one.service.store.close()
    await store.close()
    await bus.close()


@pytest.fixture
async def hall(new_bench: NewBench, nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path) -> AsyncIterator[NewHall]:
    """``hall(**sections)``: at work, with one gateway before its replica. ``address``: where each of its gateways listens."""
    made: list[Hall] = []
    beating: list[asyncio.Task[None]] = []

    async def make(address: str = "", **sections: dict[str, Any]) -> Hall:
        gateway = {"gateway_replicas": 1, "gateway_checkpoint_tokens": CHUNK, "gateway_wait": 20.0}
        desk = await new_bench(gateway=gateway | sections.pop("gateway", {}), **sections)
        environment = {"NATS_URL": nats.url, "REDIS_URL": valkey.url, "MYXO_RUN": run_name} | ({"MYXO_GATEWAY": address} if address else {})

        async def beat() -> None:
            while True:
                await desk.service.announce()
                await asyncio.sleep(desk.service.heartbeat)

        beating.append(asyncio.create_task(beat()))
        made.append(Hall(desk, tmp_path, environment))
        await made[-1].start()
        return made[-1]

    yield make
    for one in made:
        for process in one.processes:
            process.__exit__()
        await one.desk.replica.proxy.close()
    await cancelled(beating)


@pytest.fixture
async def room(hall: NewHall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewHall:
    """``room(agent, **sections)``: at work with that agent."""
    monkeypatch.setenv(agents.DIRECTORY, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def make(agent: str, **sections: dict[str, Any]) -> Hall:
        rollout = {"agent": agent, "agent_workers": 1, **sections.pop("rollout", {})}
        return await hall(rollout=rollout, reward={"worker_environment": [agents.DIRECTORY]}, **sections)

    return make
