"""Containers: their command lines and their probe."""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from services.rollout.agent_runner import AgentContainers, environment_of
from shared.process.embedded_servers import free_port
from shared.runtime import http_endpoints
from shared.runtime.addresses import HttpAddress, http_address, parsed
from shared.runtime.errors import ConfigError
from shared.sandbox.program import SandboxLimits, SandboxSettings
from shared.sandbox.sandbox_command import container_command
from tests.support.listening_sockets import listening_sockets
from tests.support.run_config import run_config
from tests.support.tables import table


async def probe(address: str, *words: str) -> tuple[int, str]:
    """Exit code and standard output of the probe in a container whose service has this ``MYXO_HTTP``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shared.runtime.healthcheck", *words, env=os.environ | {"MYXO_HTTP": address}, stdout=subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.fixture
def app() -> Starlette:
    return http_endpoints.health_app(lambda: {"ok": True}, CollectorRegistry())


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
async def test_the_probe_says_what_the_service_says(ok: bool, code: int) -> None:
    app = http_endpoints.health_app(lambda: {"ok": ok, "state": "ready"}, CollectorRegistry())
    port = free_port()
    async with http_endpoints.serving(app, HttpAddress("127.0.0.1", port)):
        assert (await probe(f"0.0.0.0:{port}"))[0] == code
        found, said = await probe("0.0.0.0:1", f"127.0.0.1:{port}/healthz")
    assert found == code
    assert '"state":"ready"' in said


async def test_a_service_that_does_not_answer_is_not_well() -> None:
    code, said = await probe(f"0.0.0.0:{free_port()}")
    assert code == 1
    assert "no reply from" in said


async def test_the_probe_asks_the_address_that_the_service_was_given(app: Starlette) -> None:
    async with http_endpoints.serving(app, HttpAddress("127.0.0.4", 0)) as address:
        assert address.startswith("127.0.0.4:")
        assert (await probe(address))[0] == 0


async def test_private_is_the_address_that_the_runs_machines_reach(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several networks the one of the bus alone, for the service and for its probe."""
    monkeypatch.setenv("MYXO_HOST", "127.0.0.7")
    before = listening_sockets(os.getpid())
    async with http_endpoints.serving(app, parsed("private:0")) as address:
        assert {f"{found.address}:{found.port}" for found in listening_sockets(os.getpid()) - before} == {address}
        assert address.startswith("127.0.0.7:")
        assert (await probe(f"private:{address.rpartition(':')[2]}"))[0] == 0


async def test_it_is_loopback_where_nobody_says_otherwise(app: Starlette, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's address, then the environment's, which wins; what listens is that address alone."""
    monkeypatch.delenv("MYXO_HTTP", raising=False)
    default = http_address(run_config(tmp_path).monitoring.http_host)
    assert default == ("127.0.0.1", 0)
    chosen = http_address(run_config(tmp_path, monitoring={"http_host": "127.0.0.5"}).monitoring.http_host)
    monkeypatch.setenv("MYXO_HTTP", f"127.0.0.6:{free_port()}")
    for address in (default, chosen, http_address("127.0.0.5")):
        before = listening_sockets(os.getpid())
        async with http_endpoints.serving(app, address) as served:
            assert {f"{found.address}:{found.port}" for found in listening_sockets(os.getpid()) - before} == {served}
            assert served.startswith(f"{address.host}:")


async def test_an_address_that_cannot_be_listened_at_is_named(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYXO_HTTP", "127.0.0.1:0")
    async with http_endpoints.serving(app, HttpAddress("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match=f"MYXO_HTTP = '{taken}': cannot be listened at: Address already in use"):
            async with http_endpoints.serving(app, parsed(taken)):
                pass
    monkeypatch.delenv("MYXO_HTTP")
    with pytest.raises(ConfigError, match=r"monitoring\.http_host = '192\.0\.2\.250:0': cannot be listened at"):
        async with http_endpoints.serving(app, HttpAddress("192.0.2.250", 0)):
            pass


@table("text", ["9464", ":9464", "host:", "host:port", "host:70000", "host:-1", "host:٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="MYXO_HTTP = "):
        parsed(text)


@table(("text", "wildcard"), [("[::1]:5", False), ("[::]:5", True), ("0.0.0.0:5", True), ("buffer:5", False)])
def test_addresses_are_written_as_they_are_read(text: str, wildcard: bool) -> None:
    assert str(parsed(text)) == text
    assert parsed(text).wildcard == wildcard


def test_an_answers_body_does_not_wait_for_its_heads_acknowledgement() -> None:
    """Head and body are two writes: where the kernel collects small ones, the second one waits 40 ms."""
    listener = http_endpoints._listener(HttpAddress("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()[:2]), listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# --- the command lines of containers: what they take away stands in them, and nothing secret does. tests/compose runs them

TAKEN_AWAY = (("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges"), ("--pull", "never"), ("--log-driver", "none"))


def pairs(words: list[str]) -> list[tuple[str, str]]:
    return list(itertools.pairwise(words))


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_a_sandbox_is_a_container_without_network_or_rights(kind: str) -> None:
    limits = SandboxLimits(memory_bytes=64 << 20, processes=10)
    settings = SandboxSettings(kind, "python:3.11", limits, paths=(Path("/data/cases"),))  # type: ignore[arg-type]
    words = container_command(settings, "a-name", 40_007, "pass")
    assert words[:2] == [kind, "run"] and {"--read-only", "--rm", "--interactive"} <= set(words)
    limited = [
        ("--network", "none"),
        ("--name", "a-name"),
        ("--memory", str(256 << 20)),
        ("--memory-swap", str(256 << 20)),
        ("--pids-limit", "18"),
    ]
    assert {*TAKEN_AWAY, *limited, ("--mount", "type=bind,source=/data/cases,target=/data/cases,readonly")} <= set(pairs(words))
    assert "--privileged" not in words and "--init" not in words  # the supervisor is the first process
    image = words.index("python:3.11")
    assert words[image + 1] == "-i" and words[-1] == "40007" and "-S" in words[image:]


def test_an_agents_key_is_in_no_process_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "not-to-be-seen")
    rollout = {"agent_command": ["agent", "--steps"], "agent_image": "agent:1", "agent_timeout": 40, "agent_cpus": 0.5}
    containers = AgentContainers(run_config(tmp_path, rollout=rollout).rollout, ["A_SECRET"], "run", "rollout-1")
    given = environment_of("http://gateway:8000/v1", "sk-myxo-1-secret")
    words = containers.command_line("a-name", "g1/0", ["agent", "--steps"], (*given, "A_SECRET"))
    assert not [word for word in words if "sk-myxo" in word or "not-to-be-seen" in word or "gateway:8000" in word]
    wanted = {("--env", name) for name in (*given, "A_SECRET")} | {
        ("--network", "myxo-agents"),
        ("--cpus", "0.5"),
        ("--user", "65534:65534"),
    }
    assert {*TAKEN_AWAY, *wanted} <= set(pairs(words))
    assert words[words.index("agent:1") :] == ["agent:1", "-s", "KILL", "100", "agent", "--steps"]


def test_containers_of_another_service_are_not_its_own(tmp_path: Path) -> None:
    rollout = run_config(tmp_path).rollout
    one, again, other = (AgentContainers(rollout, (), "run", name)._owner for name in ("rollout-1", "rollout-1", "rollout-2"))
    assert one == again != other
