"""The weights that `myxo up --from` begins a run with are those of the run and step that it names."""

from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from myxo.commands import export_run
from myxo.preflight import Source
from myxo.run.run_directory import CHECKPOINTS, MARKER, RunDirectory
from shared.runtime.errors import ConfigError, MyxoError
from tests.support.run_config import run_config


def test_a_conversion_that_hangs_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_run, "CONVERT_SECONDS", 0.0)
    with pytest.raises(MyxoError, match="the checkpoint of step 3 in .* was not converted within 0 s"):
        export_run.converted(run_config(tmp_path), tmp_path, 3, tmp_path / "made")


def test_an_export_where_the_trainer_is_not_says_what_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to what the trainer may write; nothing is begun here."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = run_config(tmp_path, trainer={"save": str(tmp_path / "trained")})
    (config.trained / CHECKPOINTS["actor"] / "step_00000003").mkdir(parents=True)
    (config.trained / CHECKPOINTS["actor"] / "step_00000003" / MARKER).touch()
    monkeypatch.setattr(export_run, "config_of", lambda *given: config)
    with pytest.raises(MyxoError, match=r"--no-deps trainer python -m \S+.convert_command \S+ \S+/trained/\S+/step_3 --step 3"):
        export_run.export(Namespace(run="a", dir=tmp_path, step=None, target=None), Console(quiet=True))
    assert not (config.trained / "export").exists()


def test_weights_of_another_try_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run's export stayed, whatever run and step the start itself named."""
    config = tmp_path / "run.toml"
    sections = 'model]\nhf_checkpoint = "m"\n[data]\nprompt_data = "p"\n[rollout]\nnum_rollout = 1\nrollout_batch_size = 1\n'
    config.write_text(f'[run]\nname = "a"\ndir = "."\n[{sections}n_samples_per_prompt = 2\n')
    for step in (1, 2):
        path = tmp_path / "a" / CHECKPOINTS["actor"] / f"step_{step:08d}" / MARKER
        path.parent.mkdir(parents=True)
        path.touch()

    def write(_: object, root: Path, step: int, target: Path) -> Path:  # the conversion itself has its tests
        target.mkdir(parents=True)
        (target / "step").write_text(str(step))
        return target

    monkeypatch.setattr(export_run, "converted", write)
    monkeypatch.chdir(tmp_path)

    def begun(name: str, **how: bool) -> str:
        made = export_run.begun_from(Source.of(config, ["--name", "b"]), name, Console(quiet=True), **{"fresh": False, **how})
        return Path(made[1].overrides["model"]["hf_checkpoint"], "step").read_text()

    assert [begun(name) for name in (f"{config}@1", f"{config}@2", str(config))] == ["1", "2", "2"]
    (tmp_path / "b" / "logs").mkdir()
    assert begun(str(config)) == "2"
    with pytest.raises(ConfigError, match="with whose weights run b began"):
        begun(f"{config}@1")
    with pytest.raises(ConfigError, match="what it began with would be replaced"):
        begun(f"{config}@1", fresh=True, tried=True)
    assert begun(str(config)) == "2" and begun(f"{config}@1", fresh=True) == "1"

    (tmp_path / "b").rename(tmp_path / "before")  # as `myxo move` leaves them
    frozen = run_config(tmp_path, run={"name": "b", "dir": str(tmp_path)}, model={"hf_checkpoint": str(tmp_path / "before" / "beginning")})
    (tmp_path / "b" / "logs").mkdir(parents=True)
    RunDirectory(tmp_path / "b").freeze(frozen)
    assert begun(f"{config}@1") == "1"
    (tmp_path / "before" / "beginning" / export_run.FROM).unlink()
    with pytest.raises(ConfigError, match="name of a run that has not begun"):
        begun(f"{config}@1")
