"""A run on the shared servers, and somebody to play its other services."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.buffer.buffer_service import serve
from shared.bus import runs
from shared.bus.connection import Bus
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.service import service_base
from shared.service.service_base import Service
from shared.store.payload_store import Store
from tests.integration.buffer.player import Player
from tests.support.run_config import run_config, write_jsonl
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until

NewRun = Callable[..., Awaitable[Player]]
Launched = Callable[..., Awaitable[tuple[Player, ServiceProcess]]]
Served = Callable[..., Awaitable[Player]]

SHORT = {"ack_wait": 2.0, "lease_duration": 2.0}
"""[bus] of runs whose buffers die: lost work and a lost lease are given to another soon."""


@pytest.fixture
async def new_run(
    bus: Bus, nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tiny_model: Path, tmp_path: Path
) -> AsyncIterator[NewRun]:
    """Makes the test's run, with config sections laid over the smallest config."""
    stores: list[Store] = []

    async def make(**sections: dict[str, Any]) -> Player:
        write_jsonl(tmp_path / "prompts.jsonl")
        sections.setdefault("run", {}).setdefault("name", run_name)
        sections.setdefault("model", {}).update({"hf_checkpoint": str(tiny_model)})
        sections.setdefault("reward", {}).update({"rm_type": "exact"})
        config = run_config(tmp_path, **sections)
        await runs.create(bus, config, valkey.url)
        stores.append(Store(valkey.url, config.run.name))
        return Player(bus, stores[-1], config, nats.url, tmp_path)

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
async def launched(new_run: NewRun) -> AsyncIterator[Launched]:
    """Makes the test's run and its buffer, and waits until that is ready; kills the buffer at the end."""
    processes: list[ServiceProcess] = []

    async def launch(**sections: dict[str, Any]) -> tuple[Player, ServiceProcess]:
        player = await new_run(**sections)
        processes.append(player.launch())
        await player.ready(processes[-1])
        return player, processes[-1]

    yield launch
    for process in processes:
        process.__exit__()


@pytest.fixture
async def served(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """Makes the test's run and serves as its buffer in this process, which saves a start of Python; it must serve until the end."""
    serving: list[tuple[Service, asyncio.Task[None]]] = []

    async def start(**sections: dict[str, Any]) -> Player:
        player = await new_run(**sections)
        for name, value in player.environment("buffer-1").items():
            monkeypatch.setenv(name, value)
        service = await service_base.connect("buffer")
        ready = asyncio.Event()

        async def life() -> None:
            async with service_base.attended(service):
                ready.set()
                await serve(service)

        serving.append((service, asyncio.create_task(life())))
        await ready.wait()
        await until(lambda: service.state == "ready" or serving[-1][1].done(), "a buffer that is ready")
        return player

    yield start
    for service, task in serving:
        assert not task.done(), task
        service.stopping.set()
        await task
        await service.store.close()
        await service.bus.close()


async def on_mortal_servers(
    nats: EmbeddedNats, valkey: EmbeddedValkey, directory: Path, model: Path, **bus_section: float
) -> tuple[Player, Bus, Store]:
    """A run on servers that the test may kill, and the player's connections to them, to be closed at the end."""
    write_jsonl(directory / "prompts.jsonl")
    config = run_config(directory, model={"hf_checkpoint": str(model)}, reward={"rm_type": "exact"}, bus={"ack_wait": 2.0, **bus_section})
    bus, store = await Bus.connect(nats.url, "player"), Store(valkey.url, config.run.name)
    await runs.create(bus, config, valkey.url)
    return Player(bus, store, config, nats.url, directory), bus, store
