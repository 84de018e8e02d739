"""What `myxo quickstart` makes before it runs, and what it refuses. Whole runs: `tests/e2e/test_ordinary_pypi.py`."""

import filecmp
import importlib.util
from pathlib import Path

import pytest

from myxo.commands.quickstart import CONFIG, DATA, SITE_VARIABLE, quickstart
from myxo.display import SafeConsole
from myxo.main import main
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError, Problems

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "arithmetic"
NO_STEP = ["--num-rollout", "-1"]
"""Refused once all is made, before anything starts."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SITE_VARIABLE, str(tmp_path))


def test_a_directory_that_cannot_be_one_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file")
    assert main(["quickstart", "taken"]) == exit_codes.BAD_INPUT
    assert "DIR = 'taken': " in capsys.readouterr().err and (tmp_path / "taken").read_text() == "a file"


def test_an_unknown_flag_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--num-rollouts = '': unknown flag"):
        quickstart(tmp_path / "new", ["--num-rollouts", "5"], SafeConsole())
    assert not (tmp_path / "new").exists()


def test_what_is_not_installed_is_told_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else found(name, *rest))
    with pytest.raises(ConfigError, match=r"'torch': not installed: pip install 'myxo\[quickstart\]'"):
        quickstart(tmp_path / "new", [], SafeConsole())
    assert not (tmp_path / "new").exists()


def test_the_directory_is_made_once_and_what_was_changed_in_it_stays(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, Problems), match=r"num_rollout"):
        quickstart(tmp_path / "new", NO_STEP, SafeConsole())
    config, data = tmp_path / "new" / CONFIG, tmp_path / "new" / DATA
    assert filecmp.cmp(config, EXAMPLE / CONFIG, shallow=False)
    assert (data / "model" / "model.safetensors").is_file() and (data / "train.jsonl").is_file()
    config.write_text(config.read_text() + "# mine\n")
    (data / "train.jsonl").write_text("mine")
    with pytest.raises((ConfigError, Problems), match=r"num_rollout"):
        quickstart(tmp_path / "new", NO_STEP, SafeConsole())
    assert config.read_text().endswith("# mine\n") and (data / "train.jsonl").read_text() == "mine"
