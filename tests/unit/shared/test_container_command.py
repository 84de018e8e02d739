"""The command lines of containers: what they take away stands in them, and nothing secret does. tests/compose runs them."""

import itertools
from pathlib import Path

import pytest

from services.rollout.agent_runner import AgentContainers, environment_of
from shared.sandbox.program import SandboxLimits, SandboxSettings
from shared.sandbox.sandbox_command import container_command
from tests.support.run_config import run_config

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
