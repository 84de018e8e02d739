"""What is checked of sandboxes before a start."""

from pathlib import Path

import pytest

from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.machine_checks import check_sandbox
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.tables import table


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
