"""Deaths in the middle of pushes: no replica ever serves a mixed version, and every one comes to serve a new one."""

import asyncio
import multiprocessing as mp
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.service_messages import ServiceStatus
from tests.chaos import parts
from tests.support.forking import OwnForkServer
from tests.support.run_config import run_config

_server = OwnForkServer("tests.chaos.parts")

SEED = 6
REPLICAS = 3
RECOVERY_SECONDS = 120.0
LONGEST_WAIT = 0.4
"""Seconds before a death. A push takes some 50 ms, four begin in a second."""


class Parts:
    """The processes, by name (``trainer``, others are replicas), and how they are started again."""

    def __init__(self, directory: Path, model: Path, environment: dict[str, str], names: Sequence[str]) -> None:
        self._context = mp.get_context("forkserver")
        self._arguments = (str(directory), str(model), environment)
        self.running: dict[str, Any] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        work: Any = parts.trainer if name == "trainer" else parts.replica
        arguments = self._arguments if name == "trainer" else (name, *self._arguments)
        self.running[name] = self._context.Process(target=work, args=arguments, daemon=True)
        _server.start(self.running[name])

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].join(60)

    def stop(self) -> None:
        for name in self.running:
            self.kill(name)


@pytest.mark.extra(each=True)  # test_push_stages.py has a death at each stage of a push
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("at_least", [3, 50])
async def test_deaths(at_least: int, mortal_nats: EmbeddedNats, valkey: EmbeddedValkey, tiny_model: Path, tmp_path: Path) -> None:
    """kill -9 of replicas and of the trainer, one to four of them shortly after one another, at moments drawn by the seed."""
    config = run_config(tmp_path, model={"hf_checkpoint": str(tiny_model)}, rollout={"rollout_device": "cpu"})
    bus = await Bus.connect(mortal_nats.url, "test")
    await runs.create(bus, config, valkey.url)
    draw = random.Random(SEED)
    environment = {"NATS_URL": mortal_nats.url, "REDIS_URL": valkey.url, "MYXO_RUN": config.run.name, "MYXO_LOG_LEVEL": "ERROR"}
    running = Parts(tmp_path, tiny_model, environment, ["trainer", *(f"rollout-{number}" for number in range(REPLICAS))])
    registry, wrong = Registry(bus, config.run.name), tmp_path / "wrong"
    try:
        await serve_beyond(registry, -1, wrong, "the beginning")
        deaths = 0
        while deaths < at_least:
            victims = draw.sample(sorted(running.running), draw.randint(1, 4))
            for victim in victims:
                await asyncio.sleep(draw.uniform(0, LONGEST_WAIT))
                running.kill(victim)
            version = await newest(registry)
            for victim in victims:
                running.start(victim)
            deaths += len(victims)
            await serve_beyond(registry, version, wrong, f"death {deaths} of seed {SEED}, of {victims}, at version {version}")
    finally:
        running.stop()
        await bus.close()
    assert not wrong.exists(), wrong.read_text()


async def newest(registry: Registry) -> int:
    return max((card.version for card in await registry.alive("rollout")), default=-1)


async def serve_beyond(registry: Registry, version: int, wrong: Path, after: str) -> None:
    """Waits until every replica serves a version newer than ``version``."""
    end, cards = time.monotonic() + RECOVERY_SECONDS, list[ServiceStatus]()
    while time.monotonic() < end:
        assert not wrong.exists(), f"after {after}: {wrong.read_text()}"
        cards = await registry.alive("rollout")
        if len(cards) == REPLICAS and all(card.version > version and card.state == "ready" for card in cards):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"after {after}: {[(card.instance, card.state, card.version) for card in cards]}")
