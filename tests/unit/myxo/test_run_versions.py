"""Which weight versions of a run lie on disk, the config of one that evaluates them or begins with them, and what a torn run needs."""

import json
import os
import tomllib
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from myxo.commands import export_run
from myxo.commands.evaluate import _figures, chosen_version, evaluating, versions_on_disk
from myxo.commands.export_run import config_of
from myxo.commands.repair import LedgerCut, LedgerExtent, RepairPlan, extent, repair_plan
from myxo.main import main
from myxo.preflight import Source
from myxo.preflight.inspection import Inspection
from myxo.preflight.machine_checks import check_directories
from myxo.run.run_directory import CHECKPOINTS, MARKER, RunDirectory
from shared.bus import runs
from shared.config import config_reading, flags
from shared.config.config_reading import parse
from shared.config.run_config import RunConfig
from shared.model.quantization import ENTRY, FORMATS
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.exit_codes import BAD_INPUT
from shared.schema.ledger import BatchTrained, CheckpointDurable, LedgerRecord, LedgerRepaired, VersionLive
from shared.transfer.weight_checkpoint import WeightCheckpoints
from tests.support.run_config import run_config
from tests.support.tables import table


def stored(directory: Path, *steps: int, sft: bool = False, **weights: Any) -> RunConfig:
    """A run of four steps with checkpoints of these."""
    warm: dict[str, Any] = {"sft_data": "s.jsonl"} if sft else {}
    trainer = {"save_hf": str(directory / "exports" / "{rollout_id}")}
    config = run_config(directory, rollout={"num_rollout": 4}, weights=weights, sft=warm, trainer=trainer)
    for step in steps:
        checkpoint = config.trained / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "checkpoint.json").write_text("{}")
    return config


def exported(path: Path, steps: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "trained.json").write_text(json.dumps({"steps": steps}))
    return path


def found(config: RunConfig) -> dict[int, str]:
    return {version: item.what.split()[1] for version, item in versions_on_disk(config).items()}


def test_versions_come_from_the_model_checkpoints_and_exports(tmp_path: Path) -> None:
    config = stored(tmp_path, 0, 2, 4)
    assert found(config) == {0: "initial", 2: "checkpoint", 4: "checkpoint"}
    first = exported(tmp_path / "exports" / "1", 2)
    (config.trained / "hf").mkdir()
    assert found(config) == {0: "initial", 2: "export", 4: "checkpoint"}, "an export that is not complete is none"
    exported(config.trained / "hf", 4)
    assert found(config)[4] == "export"
    assert chosen_version(config, None).version == 4 and chosen_version(config, 2).make(tmp_path) == first
    (first / "trained.json").write_text('{"steps": 2, "run": "other"}')
    assert found(config)[2] == "checkpoint", "another run's is none"


def test_snapshots_of_quantized_weights_are_what_engines_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightCheckpoints, "readable", lambda self: [SimpleNamespace(version=2, path=self.path_of(2))])
    exported(tmp_path / "exports" / "1", 2)
    plain = stored(tmp_path, 0, 2, 4)
    fewer = plain.with_fields(rollout={"rollout_precision": "int4"})
    assert found(plain)[2] == "export" and found(fewer) == {0: "initial", 2: "snapshot", 4: "checkpoint"}
    assert chosen_version(fewer, 2, plain=True).what.startswith("the export"), "a trainer reads plain ones"


def test_an_export_is_the_version_that_its_mark_tells(tmp_path: Path) -> None:
    config = stored(tmp_path)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"save_hf": tmp_path / "one"})})
    for path, steps in ((config.trained / "hf", 2), (tmp_path / "one", 3)):  # the run ended at 2, continued, and stopped at 3 of 4
        exported(path, steps)
    assert {version: item.make(tmp_path).name for version, item in versions_on_disk(config).items() if version} == {2: "hf", 3: "one"}


def test_an_export_of_a_life_before_is_none(tmp_path: Path) -> None:
    exported(tmp_path / "exports" / "3", 4)
    assert found(stored(tmp_path)) == {0: "initial", 4: "export"}
    assert found(stored(tmp_path, 0, 2)) == {0: "initial", 2: "checkpoint"}, "--fresh leaves what save_hf wrote"


def test_a_place_where_something_else_lies_is_named_before_the_start(tmp_path: Path) -> None:
    config = stored(tmp_path, 0, 2).with_fields(trainer={"save_interval": 2})
    (exported(tmp_path / "exports" / "1", 2) / "trained.json").write_text('{"run": "other", "steps": 2}')  # of a step that is past
    (exported(tmp_path / "exports" / "2", 3) / "trained.json").unlink()  # of one without an export
    last = exported(tmp_path / "exports" / "3", 4)
    assert list(check_directories(Inspection(config))) == [], "it is this run's own"
    [problem] = check_directories(Inspection(config, fresh=True))
    assert str(problem).startswith(f"trainer.save_hf = '{tmp_path / 'exports' / '1'}'")
    (last / "trained.json").unlink()
    [problem] = check_directories(Inspection(config))
    assert str(problem).startswith(f"trainer.save_hf = '{last}'")
    [problem] = check_directories(Inspection(config.with_fields(trainer={"save_hf": tmp_path})))
    assert str(config.trained) in str(problem), "its first export would remove the run"


def test_figures_stand_at_the_steps_of_the_version(tmp_path: Path) -> None:
    config, own = stored(tmp_path, update_weights_interval=3), run_config(tmp_path, run={"name": "own"})
    own.run.root.mkdir(parents=True)
    (own.run.root / "summary.json").write_text('{"evaluations": [{"dataset": "a", "version": 0, "newest": 0, "step": 0}]}')
    assert [_figures(config, own, version)["evaluations"][0]["step"] for version in (1, 2)] == [3, 4]


def test_after_a_warm_start_version_0_is_a_checkpoint(tmp_path: Path) -> None:
    assert found(stored(tmp_path, 0, sft=True)) == {0: "checkpoint"}


def test_steps_between_two_versions_are_none(tmp_path: Path) -> None:
    assert found(stored(tmp_path, 1, 2, 3, 4, update_weights_interval=3)) == {0: "initial", 1: "checkpoint", 2: "checkpoint"}


def test_versions_are_numbered_by_the_runs_steps_and_flags_are_laid_over_key_by_key(tmp_path: Path) -> None:
    kept = run_config(tmp_path, rollout={"num_rollout": 8, "sglang": {"context-length": 64}})
    kept.run.root.joinpath("logs").mkdir(parents=True)
    runs.freeze(kept.run.root, kept)
    for steps in ({"num_rollout": 4}, {"num_rollout": 0, "num_epoch": 3}):
        (tmp_path / "run.toml").write_text(config_reading.dump(run_config(tmp_path, rollout=steps)))
        assert config_of(str(tmp_path / "run.toml"), tmp_path, flags.read([])).rollout.num_rollout == 8
    own = config_of("test", kept.run.dir, flags.read(["--sglang-page-size", "8"]))
    assert own.rollout.sglang == {"context-length": 64, "page-size": "8"}


def test_a_version_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--version = 7: one that lies on disk: 0, 2"):
        chosen_version(stored(tmp_path, 2), 7)
    with pytest.raises(ConfigError, match=r"a run with weights on disk"):
        chosen_version(run_config(tmp_path / "none", sft={"sft_data": "s.jsonl"}), None)


def test_an_export_names_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = stored(tmp_path)
    RunDirectory(config.run.root).logs.mkdir(parents=True)
    runs.freeze(config.run.root, config)
    words = ["export", "test", "--dir", str(config.run.dir)]
    assert main(words) == BAD_INPUT and "RUN = 'test': a run with a checkpoint; there is none in" in capsys.readouterr().err
    stored(tmp_path, 2, 4)
    assert main([*words, "--step", "3"]) == BAD_INPUT and "--step = 3: a checkpoint that is there: 2, 4" in capsys.readouterr().err


def test_a_version_is_evaluated_by_a_run_of_its_own_without_a_trainer(tmp_path: Path) -> None:
    held_out = {"eval_prompt_data": ["a", "/a.jsonl"], "sets": [{"name": "b", "path": "/b.jsonl", "top_k": 3}], "eval_interval": 2}
    rollout = {"num_rollout": 4, "rollout_replicas": 2, "eval_replicas": 1, "rollout_precision": "fp8"}
    config = run_config(tmp_path, sft={"sft_data": "/s.jsonl"}, eval=held_out, rollout=rollout)
    own = parse(tomllib.loads(config_reading.dump(evaluating(config, 3, tmp_path / "v3"))))
    assert (own.run.name, own.model.hf_checkpoint, own.rollout.num_rollout) == ("test-eval-v3", tmp_path / "v3", 0)
    assert own.debug.debug_rollout_only and own.sft.sft_data is None and own.eval == config.eval
    assert own.rollout.rollout_precision == "fp8"
    (tmp_path / "v4").mkdir()
    (tmp_path / "v4" / "config.json").write_text(json.dumps({ENTRY: FORMATS["fp8"].entry(())}))
    assert evaluating(config, 4, tmp_path / "v4").rollout.rollout_precision == "checkpoint", "a snapshot is quantized already"


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
    runs.freeze(tmp_path / "b", frozen)
    assert begun(f"{config}@1") == "1"
    (tmp_path / "before" / "beginning" / export_run.FROM).unlink()
    with pytest.raises(ConfigError, match="name of a run that has not begun"):
        begun(f"{config}@1")


def ledger(*steps: int) -> list[LedgerRecord]:
    """These steps were trained, as records; a negative number: a checkpoint of so many steps is durable."""
    return [
        BatchTrained(step=step, version=step, started=0.0, ended=1.0, at=1.0) if step >= 0 else CheckpointDurable(steps=-step, at=1.0)
        for step in steps
    ]


def numbered(records: list[LedgerRecord], *lacking: int) -> list[tuple[int, LedgerRecord]]:
    return [(sequence, record) for sequence, record in enumerate(records, 1) if sequence not in lacking]


def test_a_whole_ledger_is_good_to_its_end() -> None:
    found = extent(numbered(ledger(0, 1, 2, -2, 3)), 5)
    assert found == LedgerExtent(trained=4, durable=2)
    assert extent([], 0) == LedgerExtent()


@table(("lacking", "after", "trained"), [((3,), 2, 2), ((1,), 0, 0), ((2, 3), 1, 1), ((5,), 4, 3), ((3, 5), 2, 2), ((1, 2, 3, 4, 5), 0, 0)])
def test_a_ledger_is_cut_before_its_first_gap(lacking: tuple[int, ...], after: int, trained: int) -> None:
    found = extent(numbered(ledger(0, 1, 2, -2, 3), *lacking), 5)
    assert found.cut is not None and (found.cut.after, found.cut.last, found.trained) == (after, 5, trained)
    assert f"records {after + 1} to" in found.cut.why


def test_what_a_repair_has_cut_is_no_gap() -> None:
    repaired = LedgerRepaired(resume=2, cut_after=2, cut_last=5, at=1.0)
    records = [*enumerate(ledger(0, 1), 1), (6, repaired), *enumerate(ledger(2, 3), 7)]
    assert extent(records, 8) == LedgerExtent(trained=4)
    late = extent([*records, (10, VersionLive(version=1, at=1.0))], 10)
    assert late.cut is not None and late.cut.after == 8


@table(
    ("trained", "durable", "held", "resume", "aside"),
    [
        (5, 4, [2, 4], 4, ()),
        (4, 4, [2, 4], 4, ()),
        (3, 2, [2, 4], 2, (4,)),
        (3, 0, [4], 0, (4,)),
        (3, 0, [], 0, ()),
        (7, 2, [2, 4, 8, 10], 4, (8, 10)),
    ],
)
def test_a_run_goes_back_to_the_newest_checkpoint_that_the_ledger_knows(
    trained: int, durable: int, held: list[int], resume: int, aside: tuple[int, ...]
) -> None:
    plan = repair_plan(LedgerExtent(trained, durable), held)
    assert plan == RepairPlan(resume, None, aside) and plan.needed == bool(aside)


@pytest.mark.parametrize(("trained", "durable", "held"), [(3, 2, [4]), (5, 4, [2]), (5, 4, [])])
def test_where_no_checkpoint_fits_nothing_is_touched(trained: int, durable: int, held: list[int]) -> None:
    plan = repair_plan(LedgerExtent(trained, durable), held)
    assert plan.problem and not plan.set_aside and f"from {durable} to {trained} steps" in plan.problem


def test_a_cut_alone_is_worth_a_repair() -> None:
    plan = repair_plan(LedgerExtent(4, 2, LedgerCut(9, 12, "records 10 to 11 are gone")), [2])
    assert plan.needed and plan.resume == 2 and not plan.set_aside


def test_flags_that_change_nothing_are_said_and_keys_are_set(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stored(tmp_path, 2)
    runs.freeze(config.run.root, config)
    monkeypatch.setenv("WANDB_API_KEY", "")
    config_of(str(config.run.root), Path("runs"), flags.read(["--balance-data", "--wandb-key", "hush"]))
    assert "myxo: --balance-data changes nothing" in capsys.readouterr().err and os.environ["WANDB_API_KEY"] == "hush"
