"""What is checked of agents in containers before a start."""

from pathlib import Path

import pytest

from myxo.preflight.inspection import Inspection
from myxo.preflight.machine_checks import check_commands
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.tables import table


def test_an_image_needs_a_command(tmp_path: Path) -> None:
    [problem] = check_commands(Inspection(run_config(tmp_path, rollout={"agent_image": "agent:1"})))
    assert isinstance(problem, ConfigError) and problem.field == "rollout.agent_image" and "agent_command" in str(problem)


def test_image_and_network_have_to_be_there_and_the_command_need_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that knows one image and one network stands in for docker: what it prints and how it exits is docker's."""
    runtime = tmp_path / "docker"
    known = '"version " | "image agent:1" | "network myxo-agents"'
    runtime.write_text(f'#!/bin/sh\ncase "$1 $3" in {known}) exit 0 ;; esac\necho "Error: No such $1: $3" >&2\nexit 1\n')
    runtime.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    rollout = {"agent_command": ["only-in-the-image"], "agent_image": "agent:1"}
    assert list(check_commands(Inspection(run_config(tmp_path, rollout=rollout)))) == []
    for field, value, kind in (("agent_image", "agent:2", "image"), ("agent_network", "other", "network")):
        words = f"rollout.{field} = '{value}': one that is there where rollout services run: Error: No such {kind}: {value}"
        with pytest.raises(ConfigError, match=words):
            list(check_commands(Inspection(run_config(tmp_path, rollout=rollout | {field: value}))))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="docker cannot be started: No such file or directory"):
        list(check_commands(Inspection(run_config(tmp_path, rollout=rollout))))


@table(
    ("field", "value"), [("agent_network", "host"), ("agent_network", "none"), ("agent_network", "--privileged"), ("agent_image", "-v/:/h")]
)
def test_words_that_would_open_the_host_are_refused(tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.{field}"):
        run_config(tmp_path, rollout={"agent_command": ["a"], field: value})
