"""``myxo eval``: evaluates a version of a run after the fact, as a run of its own without training.

A version is read from where it lies on disk: an export, a snapshot, a checkpoint, or the initial model.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from myxo.commands.command_arguments import add_json, add_run
from myxo.commands.export_run import config_of, converted
from myxo.commands.up import up, with_flags
from myxo.display import SafeConsole
from myxo.launch.exit_report import evaluation_details
from myxo.preflight import Source
from myxo.run.run_directory import RunDirectory, checkpoints
from shared.config import config_reading, flags
from shared.config.run_config import RunConfig
from shared.model.final_exports import export_directory, exported_steps, hf_directory
from shared.model.quantization import entry_format
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import replace_file
from shared.runtime.safe_text import figure_table
from shared.schema.versions import is_pushed, version_after
from shared.transfer.weight_checkpoint import BrokenCheckpoint, LocalCheckpoint, WeightCheckpoints
from shared.view.run_summary import EvaluationSummary


@dataclass(frozen=True)
class VersionOnDisk:
    """A version and where it lies. ``make``: takes an empty directory's path and returns that of a Hugging Face checkpoint."""

    version: int
    what: str
    make: Callable[[Path], Path]


def versions_on_disk(config: RunConfig, *, plain: bool = False) -> dict[int, VersionOnDisk]:
    """Returns the versions of a run that can be had, by their number, each from where it costs least.

    Snapshots of quantized weights, which are what engines had, come before exports and checkpoints, which are ``plain``.
    """
    snapshots, root = WeightCheckpoints.of_run(config), config.trained / "checkpoints"
    quantized = config.rollout.rollout_precision != "checkpoint" or entry_format(config.model.hf_checkpoint) is not None
    copies = [
        VersionOnDisk(snapshot.version, f"the snapshot {snapshot.path}", partial(_copied, snapshots, snapshot.version))
        for snapshot in ([] if plain and config.rollout.rollout_precision != "checkpoint" else snapshots.readable())
    ]
    found = [
        VersionOnDisk(version, f"the checkpoint of step {step}", partial(converted, config, root, step))
        for step in checkpoints(config)
        if (version := _version(config, step)) is not None
    ]
    found += [*_exports(config), *copies] if quantized else [*copies, *_exports(config)]
    if config.sft.sft_data is None:
        found.append(VersionOnDisk(0, "the initial model", partial(_as_it_is, config.model.hf_checkpoint)))
    return {item.version: item for item in sorted(found, key=lambda item: item.version)}


def _exports(config: RunConfig) -> Iterator[VersionOnDisk]:
    last = max(checkpoints(config), default=config.rollout.num_rollout)  # later exports are of a life before --fresh
    exports = [export_directory(config.trainer.save_hf, done) for done in range(1, last + 1)] if config.trainer.save_hf is not None else []
    for path in (*exports, hf_directory(config)):
        done = exported_steps(config, path) or 0
        if 0 < done <= last and (path / "config.json").is_file() and (version := _version(config, done)) is not None:
            yield VersionOnDisk(version, f"the export {path}", partial(_as_it_is, path))


def chosen_version(config: RunConfig, version: int | None, *, plain: bool = False) -> VersionOnDisk:
    """Returns a version of a run, the newest where none is named. Raises ConfigError that names those that there are."""
    there = versions_on_disk(config, plain=plain)
    if not there:
        raise ConfigError("RUN", config.run.name, f"a run with weights on disk; there are none in {config.trained}")
    if version is not None and version not in there:
        shown = ", ".join(map(str, there))
        raise ConfigError("--version", version, f"one that lies on disk: {shown} (save_interval, save_hf and snapshot_interval keep more)")
    return there[max(there) if version is None else version]


def _as_it_is(path: Path, _: Path) -> Path:
    return path


def _copied(source: WeightCheckpoints, version: int, target: Path) -> Path:
    local, chain = LocalCheckpoint(target), source.chain(version)
    held = local.follow(source, version)
    if len(chain) == 1:  # it is the run's own, which may remove it
        local.copy_from(held)
        held = local.held() or held
    return held.path


def _version(config: RunConfig, steps: int) -> int | None:
    """Returns the version that the policy after ``steps`` steps is; None where it lies between two."""
    interval, total = config.weights.update_weights_interval, config.rollout.num_rollout
    return version_after(steps, interval, total) if is_pushed(steps, interval, total) else None


def materialized(item: VersionOnDisk, target: Path) -> Path:
    """Returns a Hugging Face checkpoint of a version, made below ``target`` where it has to be made. Raises MyxoError."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        return item.make(target)
    except (BrokenCheckpoint, OSError) as error:
        raise ConfigError("--version", item.version, str(error)) from error


_ABOUT = """Evaluate a version of a run that lies on disk: an export, a snapshot, a checkpoint, or the initial model.

RUN is a run's name or its directory, evaluated on the sets of its own config, or a TOML file, whose run is evaluated on the sets that
the file names now. Flags are laid over either. The evaluation is a run of its own, RUN-eval-vN beside RUN; its figures go to
RUN/evaluations/vN.json."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo eval``."""
    with_flags(command, _ABOUT, "RUN|CONFIG [--version N] [--dir DIR]", _run)
    add_run(command, "RUN|CONFIG", ", or a config's TOML file")
    command.add_argument("--version", type=int, metavar="N", help="the weight version (default: the newest on disk)")
    add_json(command)


def _run(parsed: argparse.Namespace, console: Console) -> int:
    config = config_of(parsed.run, parsed.dir, flags.read(parsed.flags))
    if not config.eval.named:
        expected = "sets to evaluate on: --eval-prompt-data NAME PATH, --eval-config or [[eval.sets]]"
        raise ConfigError("eval.eval_prompt_data", None, expected)
    item = chosen_version(config, parsed.version)
    directory = config.run.root / "evaluations"
    output = SafeConsole(stderr=True) if parsed.json else console
    output.print(f"Version {item.version} of {config.run.name} is {item.what}.", soft_wrap=True)
    model = materialized(item, directory / f"v{item.version:06d}-model")
    own = evaluating(config, item.version, model)
    path = directory / f"v{item.version:06d}.toml"
    replace_file(path, config_reading.dump(own).encode(), mode=0o600)
    code = up(Source.of(path, []), output, fresh=True)
    if code == exit_codes.DONE:
        figures = _figures(config, own, item.version)
        replace_file(directory / f"v{item.version:06d}.json", json.dumps(figures, indent=2).encode())
        found = [EvaluationSummary(**fields) for fields in figures["evaluations"]]
        rows = [(f"eval/{one.dataset}", f"{one.mean_reward:.3f} over {one.samples} samples{evaluation_details(one)}") for one in found]
        if parsed.json:
            console.file.write(json.dumps(figures, indent=2) + "\n")
        else:
            console.print(figure_table(rows, f"Version {item.version} of {config.run.name}"))
    return code


def evaluating(config: RunConfig, version: int, model: Path) -> RunConfig:
    """Returns the config of the run that evaluates a version of another run, whose weights lie in ``model``."""
    unset = dict.fromkeys(("update_weight_disk_dir", "update_weight_engine_dir", "object_store_url"))
    precision = {} if entry_format(model) is None else {"rollout_precision": "checkpoint"}  # it is quantized already
    suffix = f"-eval-v{version}"
    return config.with_fields(
        run={"name": config.run.name[len(suffix) - 63 :].lstrip("-_") + suffix},  # of at most 63 characters; a name's end has the time
        model={"hf_checkpoint": model},
        rollout={"num_rollout": 0, "num_epoch": None, "num_rollout_per_epoch": None, "eval_replicas": 0, **precision},
        sft={"sft_data": None},
        trainer={"critic_load": None, "save_hf": None},
        weights={"update_weight_transport": "nccl", "join_from": "auto", **unset},
        debug={"save_debug_rollout_data": None, "save_debug_train_data": None, "dump_details": None},
    )


def _figures(config: RunConfig, own: RunConfig, version: int) -> dict[str, Any]:
    # in the run of its own the version is number 0
    known = {"version": version, "newest": version, "step": config.steps_of_version(version)}
    evaluations = [found | known for found in json.loads(RunDirectory(own.run.root).summary.read_text())["evaluations"]]
    return {"version": version, "evaluations": evaluations}
