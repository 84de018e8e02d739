"""A real sglang-router in front of a real engine: joined, served through, taken off when its replica is gone."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.rollout.engine.engine_process import EngineProcess
from services.rollout.router import Router
from shared.bus import runs
from shared.bus.connection import Bus
from shared.runtime.child_process import die_with_parent
from shared.runtime.embedded_servers import EmbeddedNats, EmbeddedValkey, free_port
from shared.runtime.service_base import Service
from tests.support.run_config import run_config
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[str]:
    """The address of a router without workers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port())]
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        yield url
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture
async def services(nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path) -> AsyncIterator[list[Service]]:
    """Two rollout services of one run, as far as a router sees them."""
    bus = await Bus.connect(nats.url, "test")
    config = run_config(tmp_path, run={"name": run_name})
    await runs.create(bus, config, valkey.url)
    made = [Service("rollout", f"rollout-{number}", run_name, bus, config, valkey.url) for number in range(2)]
    yield made
    for service in made:
        await service.store.close()
    await bus.close()


async def has(router: str, expected: list[str]) -> None:
    """Waits until these are the router's workers."""

    async def they_are() -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(f"{router}/workers") as answer:
                return [worker["url"] for worker in (await answer.json())["workers"]] == expected
        return False

    await until(they_are, f"workers {expected}", 120)


async def test_an_engine_joins_serves_and_is_taken_off_when_its_replica_is_gone(
    router: str, engine: EngineProcess, services: list[Service]
) -> None:
    first, second = services
    first.engine = engine.url
    keeping = asyncio.create_task(Router(first, router).keep())  # it waits for the router, which is still starting

    await has(router, [engine.url])

    async def generated() -> dict[str, Any] | None:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "temperature": 0.0}}
        async with aiohttp.ClientSession() as session, session.post(f"{router}/generate", json=body) as answer:
            return await answer.json() if answer.status == 200 else None

    answer = await until(generated, "a generation through the router", 120)
    assert len(answer["output_ids"]) == 3

    keeping.cancel()  # the replica is gone without a word
    await first.registry.leave(first.status())
    others = asyncio.create_task(Router(second, router).keep())
    await has(router, [])
    others.cancel()


async def test_a_replica_that_stops_takes_its_engine_off(router: str, engine: EngineProcess, services: list[Service]) -> None:
    service = services[0]
    service.engine = engine.url
    membership = Router(service, router)
    keeping = asyncio.create_task(membership.keep())

    await has(router, [engine.url])
    keeping.cancel()
    await membership.leave()
    await has(router, [])
