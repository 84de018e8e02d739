"""Agents that are commands, each in a container: what it is given, what it gives, what it may not, and that nothing of it is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.rollout.agent_runner import AgentProgram, AgentRunner
from shared.hooks import HookFailed
from shared.runtime.errors import ConfigError
from tests.compose.conftest import ROOT, run_docker
from tests.support.containers import needs_engine
from tests.support.images import base_image
from tests.support.run_config import run_config
from tests.support.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

DATA = {"label": "42", "model": "tiny", "group": "g00000007", "rollout": 3}
URL, KEY = "http://gateway:8000/v1", "sk-myxo-s1-secret"


@pytest.fixture(scope="module")
def network() -> Iterator[str]:
    needs_engine()
    name = f"myxo-test-{uuid.uuid4().hex[:8]}"
    assert run_docker("network", "create", "--internal", name).returncode == 0
    yield name
    run_docker("network", "rm", name)


@pytest.fixture
def section(network: str) -> dict[str, Any]:
    image = base_image("PYTHON_IMAGE")
    return {"agent_command": ["python", "-c", "pass"], "agent_image": image, "agent_network": network, "agent_timeout": 60}


def program(source: str) -> AgentProgram:
    return AgentProgram("rollout.agent_command", "", ("python", "-c", source), None, {})


def awake() -> bool:
    return False


async def played(directory: Path, section: dict[str, Any], source: str, instance: str = "rollout-1") -> object:
    runner = AgentRunner(run_config(directory, rollout=section), instance, awake)
    return await runner.run(program(source), DATA, URL, KEY)


def containers(network: str) -> list[str]:
    return run_docker("ps", "--all", "--quiet", "--filter", f"network={network}").stdout.split()


GIVEN = """
import json, os, sys
names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "MYXO_TEST_NAMED", "NATS_URL", "HOME")
print("noise")
print(json.dumps({"reward": 1.0, "data": json.load(sys.stdin)["label"] == "42", **{name: name in os.environ for name in names},
    "key": os.environ["OPENAI_API_KEY"] == "sk-myxo-s1-secret" and os.environ["OPENAI_BASE_URL"] == "http://gateway:8000/v1"}))
"""

HELD = """
import json, os, socket
def refused(call):
    try:
        call()
    except OSError:
        return True
    return False
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
limits = "/sys/fs/cgroup"
open("/tmp/a", "w").write("x")
print(json.dumps({
    "root": refused(lambda: open("/etc/x", "w")), "usr": refused(lambda: open("/usr/x", "w")), "user": os.getuid() == 65534,
    "groups": set(os.getgroups()) <= {65534}, "capabilities": int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0,
    "privileges": int(status["NoNewPrivs"]) == 1, "world": refused(lambda: socket.create_connection(("192.0.2.1", 80), 5)),
    "socket": not os.path.exists("/var/run/docker.sock"), "interfaces": len(socket.if_nameindex()) == 2,
}))
"""


async def test_it_is_given_what_a_command_is_given_and_held_to_what_it_needs(
    tmp_path: Path, section: dict[str, Any], network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_URL", "nats://operator:secret@nats")
    monkeypatch.setenv("MYXO_TEST_NAMED", "1")
    config = run_config(tmp_path, rollout=section, reward={"worker_environment": ["MYXO_TEST_NAMED"]})
    runner = AgentRunner(config, "rollout-1", awake)
    await runner.start()
    given = await runner.run(program(GIVEN), DATA, URL, KEY)
    assert given == {"reward": 1.0, "data": True, **dict.fromkeys(given, True), "NATS_URL": False}  # type: ignore[call-overload]
    held = await runner.run(program(HELD), DATA, URL, KEY)
    assert isinstance(held, dict) and all(held.values()), held
    await until(lambda: containers(network) == [], "the end of the containers")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('well done')", "its last line is no reward in JSON (a number, an object of numbers, or null): well done"),
        ("print('no licence'); raise SystemExit(3)", "ended with exit code 3: no licence"),
        ("held = bytearray(200 << 20)", "rollout.agent_memory_bytes = 67108864 may be too little"),
        ("import os\nfor _ in range(99): os.fork() or __import__('time').sleep(99)", "ended with exit code 1"),
        ("import os; os.execvp('no-such-program', ['x'])", "ended with exit code 1"),
    ],
)
async def test_how_it_ended_is_told(tmp_path: Path, section: dict[str, Any], network: str, source: str, words: str) -> None:
    with pytest.raises(HookFailed) as caught:
        await played(tmp_path, section | {"agent_memory_bytes": 64 << 20, "agent_processes": 20}, source)
    assert words in str(caught.value) and caught.value.field == "rollout.agent_command"
    await until(lambda: containers(network) == [], "the end of the container")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"agent_image": "myxo-test-no-such-image:1"}, "rollout.agent_image = 'myxo-test-no-such-image:1'"),
        ({"agent_network": "myxo-test-no-such-network"}, "rollout.agent_network = 'myxo-test-no-such-network'"),
        ({"agent_runtime": "podman"}, "rollout.agent_runtime = 'podman'"),
    ],
)
async def test_what_is_missing_is_named_at_the_start(
    tmp_path: Path, section: dict[str, Any], changes: dict[str, str], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "agent_runtime" in changes:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=field):
        await AgentRunner(run_config(tmp_path, rollout=section | changes), "rollout-1", awake).start()


async def test_a_program_that_the_image_lacks_is_told(tmp_path: Path, section: dict[str, Any]) -> None:
    runner = AgentRunner(run_config(tmp_path, rollout=section), "rollout-1", awake)
    with pytest.raises(HookFailed, match="has no such command, or no `timeout`"):
        await runner.run(AgentProgram("rollout.agent_command", "", ("no-such-program",), None, {}), DATA, URL, KEY)


WAITS = "import os, signal, subprocess\nsignal.signal(15, signal.SIG_IGN)\nsubprocess.run(['sleep', '600'])"


async def test_none_is_left_by_a_deadline_or_a_cancellation(tmp_path: Path, section: dict[str, Any], network: str) -> None:
    with pytest.raises(HookFailed, match="it did not end within agent_timeout = 3 s"):
        await played(tmp_path, section | {"agent_timeout": 3}, WAITS)
    assert containers(network) == []
    for seconds in (0.05, 0.3, 5.0):  # while its client starts, while it is made, while it runs
        playing = asyncio.create_task(played(tmp_path, section, WAITS))
        await asyncio.sleep(seconds)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert containers(network) == [], seconds


SERVICE = """
import asyncio, json, sys
from pathlib import Path
from services.rollout.agent_runner import AgentRunner
from services.rollout.agent_runner import AgentProgram
from shared.config.run_config import RunConfig
async def main():
    runner = AgentRunner(RunConfig.model_validate_json(sys.argv[1]), sys.argv[2], lambda: False)
    await runner.start()
    print("started", flush=True)
    if len(sys.argv) > 3:
        program = AgentProgram("rollout.agent_command", "", ("python", "-c", sys.argv[3]), None, {})
        await runner.run(program, {"group": "g00000007", "rollout": 3}, "http://gateway/v1", "k")
asyncio.run(main())
"""


async def test_what_a_killed_service_left_is_removed_by_its_successor_alone(tmp_path: Path, section: dict[str, Any], network: str) -> None:
    config = run_config(tmp_path, rollout=section).model_dump_json()

    def service(instance: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SERVICE, config, instance, *words]
        return subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)

    with service("rollout-1", WAITS) as killed, service("rollout-2", WAITS) as other:
        try:
            await until(lambda: len(containers(network)) == 2, "two containers")
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            with service("rollout-1") as successor:
                assert successor.wait(120) == 0
            [left] = containers(network)
            (found,) = json.loads(run_docker("inspect", left).stdout)
            labels = found["Config"]["Labels"]
            assert found["State"]["Running"] and labels["myxo.run"] == run_config(tmp_path).run.name
            assert labels["myxo.rollout"] == "g00000007/3"
        finally:
            for one in (killed, other):
                one.kill()
            run_docker("rm", "--force", *containers(network))


async def test_a_container_that_nobody_removes_ends_by_itself(
    tmp_path: Path, section: dict[str, Any], network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease, which the container itself keeps: here its client is killed, and nobody comes after it."""
    monkeypatch.setattr("services.rollout.agent_runner.LEASE_BEYOND_S", -55)
    runner = AgentRunner(run_config(tmp_path, rollout=section), "rollout-1", awake)
    assert runner._containers is not None
    line = runner._containers.command_line("myxo-test-lease", "g1/0", ["python", "-c", WAITS], ())
    with subprocess.Popen(line, stdin=subprocess.DEVNULL) as client:
        running = ("ps", "--quiet", "--filter", f"network={network}")
        await until(lambda: run_docker(*running).stdout, "the container")  # a created one that has not started keeps no lease
        client.kill()
    await until(lambda: containers(network) == [], "its end")
