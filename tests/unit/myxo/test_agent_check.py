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


def test_an_image_has_to_be_there_and_its_command_need_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that knows one image alone stands in for docker: what it prints and how it exits is docker's."""
    runtime = tmp_path / "docker"
    runtime.write_text('#!/bin/sh\n[ "$3" = agent:1 ] && exit 0\necho "Error: No such image: $3" >&2\nexit 1\n')
    runtime.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    rollout = {"agent_command": ["only-in-the-image"], "agent_image": "agent:1"}
    assert list(check_commands(Inspection(run_config(tmp_path, rollout=rollout)))) == []
    [problem] = check_commands(Inspection(run_config(tmp_path, rollout=rollout | {"agent_image": "agent:2"})))
    assert str(problem) == "rollout.agent_image = 'agent:2': an image that this machine has: Error: No such image: agent:2"
    monkeypatch.setenv("PATH", "/nowhere")
    [problem] = check_commands(Inspection(run_config(tmp_path, rollout=rollout)))
    assert "docker cannot be started: No such file or directory" in str(problem)


@table(
    ("field", "value"), [("agent_network", "host"), ("agent_network", "none"), ("agent_network", "--privileged"), ("agent_image", "-v/:/h")]
)
def test_words_that_would_open_the_host_are_refused(tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.{field}"):
        run_config(tmp_path, rollout={"agent_command": ["a"], field: value})
