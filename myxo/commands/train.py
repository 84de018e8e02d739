"""``myxo train``: a run from flags alone, as slime's ``python train.py`` has it, or from a config file with flags over it."""

import argparse
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from myxo.commands.up import take_flags, up
from myxo.preflight import Source
from shared.bus import runs
from shared.config import flags, slime_defaults
from shared.config.flags import CommandLine
from shared.runtime.errors import ConfigError

_TRAIN = """Run a run on this machine until it is finished, from flags alone: those of slime's train.py, Megatron's and Myxo's own.

Without CONFIG, the flags are the whole config. slime's defaults hold where they differ from Myxo's in what is trained, the run's directory
lies in --save, and the run's name is that of --run-name, that of the newest run in --load, or made of the model's name and the time. The
name of a run that is there already, without a model, goes on with it. With CONFIG it is `myxo up CONFIG [flags]`.

--dry-run prints the TOML file that the flags stand for."""

_REQUIRED: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "rollout": {}}
"""The sections that have fields without a default, so that each of these is asked for by its name."""

LONGEST_MODEL_NAME = 40
"""Characters of the model's name in a run's."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.description, command.usage = _TRAIN, f"{command.prog} [CONFIG] [options] [flags]"
    command.epilog = "flags:\n" + "\n".join(flags.help_lines())
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("--run-name", metavar="NAME", help="the run's name; default: the model's and the time")
    command.add_argument("--fresh", action="store_true", help="remove what the run has done so far and start it anew")
    command.add_argument("--dry-run", action="store_true", help="check everything, print the config as TOML, start nothing")
    command.set_defaults(flags=[], take_rest=take_flags, run_command=_train)


def _train(parsed: argparse.Namespace, console: Console) -> int:
    words = list(parsed.flags)
    path = Path(words.pop(0)) if words and not words[0].startswith("-") else None
    if parsed.run_name is not None:
        words += ["--name", parsed.run_name]
    return up(source(path, words, fresh=parsed.fresh), console, fresh=parsed.fresh, dry_run=parsed.dry_run)


def source(path: Path | None, words: list[str], *, fresh: bool = False, now: datetime | None = None) -> Source:
    """Returns where a run's config comes from. ``now``: the time in its name, where that is made."""
    given = flags.read(words)
    if path is None:
        _settle_place(given, fresh)
        if "hf_checkpoint" in given.overrides.get("model", {}) or "name" not in given.overrides["run"]:
            given.as_slime = True
            given.notes += slime_defaults.settle(given.overrides)
            defaults = slime_defaults.defaults(given.overrides)
            given.overrides = _over(defaults, _over(_REQUIRED, given.overrides))
            given.notes.append(slime_defaults.note(defaults))
            given.overrides["run"].setdefault("name", _made_name(given, now or datetime.now()))
        else:
            given.overrides = _over(_frozen(given), given.overrides)
    return Source(path, given)


def _settle_place(given: CommandLine, fresh: bool) -> None:
    """Gives the run slime's place: its directory lies in ``--save``; a run that lies in ``--load`` already goes on there."""
    run, trainer = given.overrides.setdefault("run", {}), given.overrides.get("trainer", {})
    if "load" in trainer and "name" not in run and not fresh and (newest := newest_run(Path(trainer["load"]))) is not None:
        run |= {"name": newest.name, "dir": str(newest.parent)}
        given.notes.append(f"--load {trainer['load']}: the run {newest.name} goes on")
    if "save" in trainer:
        run.setdefault("dir", trainer["save"])


def newest_run(directory: Path) -> Path | None:
    """Returns the directory of the run in ``directory`` whose config was frozen last; None where there is none."""
    frozen = [path for path in directory.glob(f"*/{runs.FROZEN}") if runs.frozen(path.parent) is not None]
    return max(frozen, key=lambda path: path.stat().st_mtime).parent if frozen else None


def _frozen(given: CommandLine) -> dict[str, Any]:
    """Returns the values of the run that the flags only name, as it was frozen. Raises ConfigError where there is none."""
    run = given.overrides["run"]
    directory = Path(run.get("dir", "runs"))
    if (config := runs.frozen(directory / run["name"])) is None:
        raise ConfigError("run.name", run["name"], f"a run that lies in {directory}; a new one needs --hf-checkpoint and the other flags")
    return config.model_dump(mode="json")


def _over(below: dict[str, dict[str, Any]], above: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {section: {**below.get(section, {}), **above.get(section, {})} for section in {**below, **above}}


def _made_name(given: CommandLine, now: datetime) -> str:
    """Returns a run's name made of the model's and the time, such as ``qwen3-4b-20260801-093000``."""
    model = Path(str(given.overrides.get("model", {}).get("hf_checkpoint", "run"))).name.partition("@")[0]
    plain = re.sub(r"[^a-z0-9_-]+", "-", model.lower()).strip("-_")[:LONGEST_MODEL_NAME] or "run"
    return f"{plain}-{now:%Y%m%d-%H%M%S}"
