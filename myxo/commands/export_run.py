"""``myxo export``: writes a checkpoint of a run in Hugging Face's format. ``myxo up --from``: begins a run with one."""

import argparse
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console

from myxo.commands.command_arguments import MODULES, add_run, count, module_command
from myxo.preflight import Source
from myxo.run import run_directory
from myxo.run.run_directory import CHECKPOINTS, RunDirectory, checkpoints
from shared.bus import runs
from shared.config import config_reading, flags
from shared.config.config_layers import over
from shared.config.flags import CommandLine
from shared.config.run_config import RunConfig
from shared.config.service_sections import RunSection
from shared.hub import hub_resolve
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError, MyxoError, raise_problems
from shared.runtime.safe_text import say

CONVERT_SECONDS = 4 * 3600.0
FROM = ".from"  # file there that names the run and step that they are of
BEGINNING = "beginning"  # directory of a run's that holds the weights with which `up --from` begins it; `--fresh` leaves them


def declare_export(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo export``."""
    add_run(command)
    command.add_argument("target", metavar="DIR", type=Path, nargs="?", help="where to; nothing may be there (default: RUN/export/step_N)")
    command.add_argument("--step", type=count, metavar="N", help="the checkpoint after N steps (default: the newest)")
    command.set_defaults(run_command=export)


def export(parsed: argparse.Namespace, console: Console) -> int:
    """Exports a checkpoint. Returns the exit code. Raises ConfigError where there is no such run or checkpoint, MyxoError for the rest."""
    config = config_of(parsed.run, parsed.dir, flags.read([]))
    step, target = _exported(config, parsed.step, parsed.target)
    untrained = "" if step else " These are the weights that it began with."
    console.print(f"Step {step} of run {config.run.name} is in {target}.{untrained}", soft_wrap=True)
    return exit_codes.DONE


def begun_from(source: Source, name: str, console: Console, *, fresh: bool, tried: bool = False) -> Source:
    """Returns where the config of a run comes from that begins with the weights of another one, which it exports into its directory.

    ``name``: ``RUN``, for its newest checkpoint, or ``RUN@STEP``. ``fresh``: export them again. ``tried``: in a dry run, which takes
    no weights from a run that has begun. Raises ConfigError, MyxoError.
    """
    path, given = source
    reading = config_reading.read(path, given.overrides)
    if reading.config is None:  # which the checks report
        return source
    own = reading.config.run
    has_begun = RunDirectory(own.root).logs.is_dir()
    if has_begun and fresh and tried:
        raise ConfigError("run.name", own.name, "another name: what it began with would be replaced; give --name, as it has begun")
    has_begun = has_begun and not fresh
    frozen = runs.frozen(own.root) if has_begun else None
    target = own.root.absolute() / BEGINNING if frozen is None else Path(frozen.model.hf_checkpoint)  # which stays where a run is moved
    if has_begun and (kept := target / FROM).is_file() and (before := kept.read_text()) != name:
        raise ConfigError("--from", name, f"{before}, with whose weights run {own.name} began; or --fresh beside it")
    if not has_begun or not kept.is_file():  # weights of a start that came to nothing, or of a dry run, may be older ones
        _take_weights(own, name, target, console, has_begun)
    given.overrides.setdefault("model", {})["hf_checkpoint"] = str(target)
    if reading.config.sft.sft_data is not None:  # the weights have had the warm start
        given.overrides.setdefault("sft", {})["sft_data"] = None
    given.words += ["--from", name]
    return source


def _take_weights(own: RunSection, name: str, target: Path, console: Console, has_begun: bool) -> None:
    run, _, step = name.partition("@")
    config = config_of(run, own.dir, flags.read([]))
    if own.name == config.run.name:
        raise ConfigError("run.name", own.name, f"another name than that of the run it begins from; give --name, as {own.name}-2")
    if (step and not step.isdecimal()) or has_begun:
        raise ConfigError("--from", name, "RUN or RUN@STEP, a checkpoint after so many steps, and the name of a run that has not begun")
    shutil.rmtree(target, ignore_errors=True)
    done, _ = _exported(config, int(step) if step else None, target)
    (target / FROM).write_text(name)  # exports leave out what begins with a dot
    words = f"Run {own.name} begins with the weights of run {config.run.name} after step {done}: they are in {target}"
    console.print(f"{words}. Optimizer, schedule and prompts begin anew.", soft_wrap=True)


def _exported(config: RunConfig, step: int | None, target: Path | None) -> tuple[int, Path]:
    """Writes a checkpoint in Hugging Face's format; returns its step, by default the newest, and where it lies."""
    found, root = checkpoints(config), config.trained / CHECKPOINTS["actor"]
    if not found:
        when = f"every {config.trainer.save_interval} steps (trainer.save_interval) and at Ctrl-C"
        raise ConfigError("RUN", config.run.name, f"a run with a checkpoint; there is none in {root} yet: one is saved {when}")
    step = found[-1] if step is None else step
    if step not in found:
        raise ConfigError("--step", step, f"a checkpoint that is there: {', '.join(map(str, found))}")
    target = target or config.trained / "export" / f"step_{step}"
    converted(config, root, step, target)
    return step, target


def converted(config: RunConfig, root: Path, step: int, target: Path) -> Path:
    """Writes a checkpoint of the trainer's in Hugging Face's format; returns ``target``. Raises MyxoError."""
    words = [str(root), str(target), "--step", str(step), "--hf", str(config.model.hf_checkpoint)]
    command = module_command(MODULES["convert"], words)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_SECONDS)
    except subprocess.TimeoutExpired:
        raise MyxoError(f"the checkpoint of step {step} in {root} was not converted within {CONVERT_SECONDS:g} s") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [""])[-1]
        raise MyxoError(f"the checkpoint of step {step} in {root} was not converted: {why}")
    return target


def config_of(name: str, directory: Path, given: CommandLine) -> RunConfig:
    """Returns the config of a file, with the steps of its run, or that which a run's directory keeps, with flags over it.

    Raises ConfigError, or Problems."""
    file = Path(name)
    path, values = (file, given.overrides) if file.is_file() else (None, _over_frozen(name, directory, given.overrides))
    reading = config_reading.read(path, values)
    raise_problems([flags.named(problem, given.typed, alone=False) for problem in (*given.problems, *reading.problems)])
    config = reading.config
    assert config is not None  # or there was a problem
    for note in (*given.notes, *reading.notes):
        say(f"myxo: {note}")
    os.environ.update(given.environment)
    if path is not None and (known := runs.frozen(config.run.root)) is not None:  # by its steps versions are numbered
        config = config.with_fields(rollout={"num_rollout": known.rollout.num_rollout})
    return hub_resolve.local(config, hub_resolve.MODELS) if hub_resolve.pins(config) else config


# The fields that name sets of held-out prompts: a flag for one takes the place of all that the run has.
_SETS = ("eval_prompt_data", "eval_config", "sets")


def _over_frozen(name: str, directory: Path, overrides: flags.Overrides) -> Any:
    try:
        _, run = run_directory.find(name, directory)
        if run is None or (frozen := runs.frozen(run.root)) is None:
            raise run_directory.no_such_run(name, directory)
    except ConfigError as error:
        raise ConfigError("RUN", name, f"{error.expected}; nor is there a file {name}, which would be a config") from None
    values: dict[str, dict[str, Any]] = run.placed(frozen).model_dump(mode="json")
    if overrides.get("eval", {}).keys() & set(_SETS):
        values["eval"] = {field: value for field, value in values["eval"].items() if field not in _SETS}
    return over(values, overrides)
