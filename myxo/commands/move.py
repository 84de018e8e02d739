"""``myxo move RUN DIR``: takes the files of a run that is at rest to another directory, as where its disk is full."""

import argparse
import asyncio
import contextlib
import os
import shutil
from pathlib import Path

from rich.console import Console

from myxo.commands.command_arguments import add_run
from myxo.run.run_access import given_servers, reach, refuse_work
from myxo.run.run_directory import RunDirectory, find, no_such_run
from shared.bus import runs
from shared.config.run_config import RunConfig
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError, MyxoError


class MoveFailed(MyxoError):
    """The files could not be copied; those of the run are where they were."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    command.add_argument("target", metavar="DIR", type=Path, help="where the run's files are to lie, in DIR/NAME")
    command.add_argument("--keep", action="store_true", help="leave the files where they were, too")
    command.set_defaults(run_command=lambda parsed, console: move(parsed.run, parsed.dir, parsed.target, console, keep=parsed.keep))


def move(run: str, directory: Path, target: Path, console: Console, *, keep: bool = False) -> int:
    """Copies a run's state to ``target/NAME`` and removes it where it was, unless it is to be kept. What else lies there, as the model that
    the run's config names, stays: it would not be found elsewhere.

    Returns the exit code. Raises ConfigError where there is no such run, its services are at work or something lies there already, RunHeld
    where it continues, and MoveFailed; then the run is where it was.
    """
    name, files = find(run, directory)
    if files is None:
        raise no_such_run(run, directory)
    source, goal = files.root.resolve(), target.absolute() / name
    if goal.exists() or goal.resolve().is_relative_to(source):
        raise ConfigError("DIR", str(target), f"a directory outside of {source}, without {name} in it")
    config = (known := runs.frozen(source)) and files.placed(known, quiet=True)
    asyncio.run(_ask_bus(run, directory, files, config))
    with files.held():
        stays = {path.name for path in source.iterdir()}.difference(files.state) | {"servers.json"}  # which are of the place
        needed = sum(path.lstat().st_size for path in source.rglob("*") if path.relative_to(source).parts[0] not in stays)
        there = next(parent for parent in (target.absolute(), *target.absolute().parents) if parent.is_dir())
        if (free := shutil.disk_usage(there).free) < needed:
            raise ConfigError("DIR", str(target), f"a disk with room for {needed >> 20} MB; {free >> 20} MB are free there")
        _copy(source, goal, stays)
        saved, words = {}, f"--dir {target.absolute()}"
        if config is not None:
            if config.trainer.save is not None and config.trained.resolve() == source:  # the checkpoints come along
                saved, words = {"save": target.absolute()}, f"{words} --save {target.absolute()}"
            runs.freeze(goal, config.with_fields(run={"dir": target.absolute()}, trainer=saved))
        if not keep:
            files.clear()
            (source / "lock").unlink()
            with contextlib.suppress(OSError):  # others' files lie there
                source.rmdir()
    told = f"Run {name} lies in {goal}; what is not its state, as a model that its config names, stays in {source}."
    console.print(f"{told} It continues there: `myxo up CONFIG {words}`.", soft_wrap=True)
    return exit_codes.DONE


async def _ask_bus(run: str, directory: Path, files: RunDirectory, config: RunConfig | None) -> None:
    if (files.nats / "jetstream").is_dir() or (config is not None and config.debug.trains_only):
        return  # who works with it holds its directory; services of `myxo submit` do not
    if files.at_rest_without_streams() and given_servers().nats_url is None:
        raise ConfigError("NATS_URL", None, "required: the run's bus is not in its directory (the run of a SLURM job stays where it is)")
    async with reach(run, directory) as access:
        await refuse_work(access)


def _copy(source: Path, goal: Path, stays: set[str]) -> None:
    """Copies all but what ``stays``, under another name until it is all there and written through to the disk."""
    partial = goal.with_name(f".{goal.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)  # until all is copied, and the modes with it
        ignored = {str(source): stays}
        shutil.copytree(source, partial, symlinks=True, ignore=lambda path, _: ignored.get(str(path), ()), dirs_exist_ok=True)
        os.sync()
        partial.rename(goal)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise MoveFailed(f"{source} could not be copied to {goal}: {error}; the run is where it was") from error
