"""A real sglang-router before a real engine: joined, served through, left when the replica is fenced or gone; nobody else directs it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from services.rollout.engine.engine_client import EngineClient
from services.rollout.replica import Replica
from services.rollout.router_registration import Router
from shared.bus import runs
from shared.bus.connection import Bus
from shared.process.child_process import with_parent
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey, free_port
from shared.runtime import router_server
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import cancelled
from shared.service.service_base import Service
from tests.support.run_config import run_config
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

KEY = "the-key-of-this-test"
BODY = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "temperature": 0.0}}


@dataclass
class RunningRouter:
    """A router's address, process and log."""

    url: str
    process: psutil.Process
    log: Path

    async def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json() if answer.content_type == "application/json" else await answer.text()

    async def has(self, expected: list[str]) -> None:
        """Waits until these are its workers."""

        async def they_are() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                status, answer = await self.ask("GET", "/workers", key=KEY)
                return status == 200 and [worker["url"] for worker in answer["workers"]] == expected
            return False

        await until(they_are, f"workers {expected}", 60)

    async def generated(self) -> Any:
        """Waits for a generation through it."""

        async def answered() -> Any:
            status, answer = await self.ask("POST", "/generate", BODY)
            return answer if status == 200 else None

        return await until(answered, "a generation through the router", 60)


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningRouter]:
    """A router without workers, and the environment in which rollout services find it."""
    key_file, url = tmp_path / "router_key", f"http://127.0.0.1:{free_port()}"
    key_file.write_text(KEY + "\n")
    monkeypatch.setenv("MYXO_ROUTER_URL", url)
    monkeypatch.setenv("MYXO_ROUTER_KEY_FILE", str(key_file))
    command = [sys.executable, "-m", "shared.runtime.router_server", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    command += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    log = tmp_path / "router.log"
    with log.open("wb") as file:
        process = subprocess.Popen(with_parent(command), stdout=file, stderr=file)
    try:
        yield RunningRouter(url, psutil.Process(process.pid), log)
    finally:
        process.kill()
        process.wait(30)


@dataclass
class Member:
    """A replica as far as a router sees it. ``joining``: what keeps it there."""

    service: Service
    router: Router
    replica: Replica
    joining: list[asyncio.Task[None]] = field(default_factory=list)

    def join(self) -> None:
        self.joining.append(asyncio.create_task(self.router.keep()))


@pytest.fixture
async def members(
    router: RunningRouter, client: EngineClient, nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path
) -> AsyncIterator[list[Member]]:
    """Two replicas of one run; the first has the engine."""
    bus = await Bus.connect(nats.url, "test")
    config = run_config(tmp_path, run={"name": run_name})
    await runs.create(bus, config, valkey.url)
    made = []
    for number in range(2):
        service = Service("rollout", f"rollout-{number}", run_name, bus, config, valkey.url)
        made.append(Member(service, Router(service, router.url), Replica(service)))
    await made[0].replica.attach(client)
    yield made
    for member in made:
        await cancelled(member.joining)
        await member.replica.proxy.close()
        await member.service.store.close()
    await bus.close()


async def test_an_engine_joins_when_it_serves_and_leaves_when_it_is_fenced(router: RunningRouter, members: list[Member]) -> None:
    first, second = members
    first.join()  # it waits for the router, which is still starting
    second.join()
    await router.has([])
    replica, service = first.replica, first.service
    assert replica.proxy.address is not None
    own = "http://{}:{}".format(*replica.proxy.address)
    assert (replica.served.state, service.engine) == ("fenced", "")  # never pushed to: it has nothing to serve

    await replica.serve(1)
    await router.has([own])
    assert len((await router.generated())["output_ids"]) == 3
    replica.served.begin_update(2)  # a push takes it off nothing
    replica.show()
    assert service.engine == own

    await replica.fence("a push failed")
    await router.has([])
    assert (await router.ask("POST", "/generate", BODY))[0] == 503
    await replica.serve(2)
    await router.has([own])
    await router.generated()

    await cancelled(first.joining)  # the replica is gone without a word
    await service.registry.leave(service.status())
    await router.has([])


@pytest.mark.extra
async def test_a_replica_that_stops_takes_its_engine_off(router: RunningRouter, members: list[Member]) -> None:
    member = members[0]
    await member.replica.serve(1)
    member.join()
    await router.has([member.service.engine])
    await cancelled(member.joining)
    await member.router.leave()
    await router.has([])


async def test_none_without_the_key_directs_the_router(router: RunningRouter, members: list[Member]) -> None:
    """The key is in no command line and no log, and the metrics are on loopback."""
    member = members[0]
    await member.replica.serve(1)
    member.join()
    await router.has([member.service.engine])
    (worker,) = (await router.ask("GET", "/workers", key=KEY))[1]["workers"]
    for key in (None, "", "another-key", KEY[:-1], KEY + "x"):
        for method, path, body in (
            ("GET", "/workers", None),
            ("POST", "/workers", {"url": "http://127.0.0.1:9"}),
            ("DELETE", f"/workers/{worker['id']}", None),
            ("POST", "/flush_cache", None),
        ):
            status, _ = await router.ask(method, path, body, key=key)
            assert status == 401, (method, path, key)
    await router.has([member.service.engine])
    assert (await router.generated())["output_ids"]
    for process in (router.process, psutil.Process(os.getpid())):
        assert KEY not in " ".join(process.cmdline())
    assert KEY not in router.log.read_text()
    found = {connection.laddr.ip for connection in router.process.net_connections("tcp") if connection.status == psutil.CONN_LISTEN}
    assert found == {"127.0.0.1"}


def test_a_router_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MYXO_ROUTER_KEY_FILE", raising=False)
    with pytest.raises(ConfigError, match="MYXO_ROUTER_KEY = .*anybody could add workers"):
        router_server.router_arguments([])
    monkeypatch.setenv("MYXO_ROUTER_KEY", KEY)
    with pytest.raises(ConfigError, match="process list"):
        router_server.router_arguments(["--control-plane-api-keys", "a:b:admin:c"])
    assert router_server.router_arguments(["--port", "1"]).prometheus_host == "127.0.0.1"


@pytest.mark.extra
async def test_a_rollout_service_without_the_key_says_so(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MYXO_ROUTER_KEY_FILE")
    with pytest.raises(ConfigError, match="MYXO_ROUTER_KEY = .*required with MYXO_ROUTER_URL"):
        Router(members[0].service, "http://127.0.0.1:9")
