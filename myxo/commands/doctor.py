"""``myxo doctor [CONFIG]``: looks at this machine, and says what is wrong with it and what mends that."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from myxo.commands.command_arguments import add_json
from myxo.commands.up import take_flags
from myxo.doctor import gpus, machine, packages, servers
from myxo.doctor.diagnosis import Diagnosis, Examination
from myxo.preflight import Source, checked_config
from shared.runtime import exit_codes
from shared.runtime.errors import BadInput, ConfigError, problems_of
from shared.runtime.safe_text import json_text

EXAMINATIONS: tuple[Examination, ...] = (
    packages.examine_python,
    packages.examine_packages,
    packages.examine_torch,
    gpus.examine_gpus,
    gpus.examine_nccl,
    gpus.examine_shared_memory,
    servers.examine_nats,
    servers.examine_store,
    machine.examine_memory,
    machine.examine_directory,
    machine.examine_cache,
    machine.examine_limits,
    machine.examine_sandbox,
)

MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "fault": ("FAULT", "bold red")}

_ABOUT = """Look at this machine: packages, GPUs and their driver, shared memory, NATS, Redis, disk, limits, the sandbox.

Each fault is told with the command that mends it. With a CONFIG (and flags over it) everything that `myxo up` checks before it starts is
looked at, too. Nothing is changed. Exits 1 where there is a fault."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.description, command.usage = _ABOUT, f"{command.prog} [CONFIG] [--dir DIR] [--json] [flags]"
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help="a run's TOML file")
    command.add_argument("--dir", type=Path, default=Path("runs"), help="where runs are to lie (default runs)")
    add_json(command, "as one JSON list")
    command.set_defaults(run_command=_run, flags=[], take_rest=take_flags)


def _run(parsed: argparse.Namespace, console: Console) -> int:
    if parsed.flags and parsed.config is None:
        raise ConfigError("CONFIG", None, f"needed for flags: {' '.join(parsed.flags)}")
    found = []
    for diagnosis in diagnoses(parsed.dir, parsed.config, parsed.flags):
        found.append(diagnosis)
        if not parsed.json:
            _show(diagnosis, console)
    faults = sum(diagnosis.state == "fault" for diagnosis in found)
    if parsed.json:
        console.file.write(json_text([asdict(diagnosis) for diagnosis in found]) + "\n")
    else:
        console.print(f"{faults} fault{'' if faults == 1 else 's'}." if faults else "Nothing is wrong.")
    return exit_codes.FAILED if faults else exit_codes.DONE


def diagnoses(directory: Path, config: Path | None, flags: list[str]) -> Iterator[Diagnosis]:
    """Yields what all examinations find, as they go. One that breaks does not hide the others."""
    for examine in EXAMINATIONS:
        try:
            yield from examine(directory)
        except Exception as error:
            subject = examine.__name__.removeprefix("examine_").replace("_", " ")
            yield Diagnosis(subject, "note", f"it could not be looked at: {type(error).__name__}: {error}")
    if config is not None:
        yield from _of_config(config, flags)


def _of_config(config: Path, flags: list[str]) -> Iterator[Diagnosis]:
    try:
        checked_config(Source.of(config, flags), starts=True)
    except BadInput as error:
        for problem in problems_of(error):
            mend = problem.expected if isinstance(problem, ConfigError) else ""
            yield Diagnosis("config", "fault", str(problem).removesuffix(f": {mend}") if mend else str(problem), mend)
    else:
        yield Diagnosis("config", "ok", f"{config} can be run")


def _show(diagnosis: Diagnosis, console: Console) -> None:
    mark, style = MARKS[diagnosis.state]
    console.print(Text.assemble((mark, style), f"  {diagnosis.subject:14}{diagnosis.found}"), soft_wrap=True)
    if diagnosis.mend:
        console.print(Text(f"{'':21}→ {diagnosis.mend}", style="cyan"), soft_wrap=True)
