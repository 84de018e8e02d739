"""``myxo plan CONFIG``: the memory that a config needs of its GPUs, and what would lower it; nothing is started."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from myxo.commands.command_arguments import add_json
from myxo.commands.up import take_flags
from myxo.plan import plan_tables
from myxo.plan.planned_config import planned
from myxo.preflight import Source
from shared.config import devices
from shared.model.memory_plan import total_parameters
from shared.runtime import exit_codes
from shared.runtime.safe_text import json_text

DEFAULT_GB = 80.0

_ABOUT = """The memory that a config needs of each GPU of the trainer and of the engines, from its layout and the model's shape alone.

Needs no GPU and no weights, only the model's config.json; of a model on the hub, config and tokenizer are downloaded. CONFIG may also be a
ready config of a model (configs/models/), whose flags describe the shape. Where something does not fit it says which part is too large
and which flags would lower it, each planned in turn. Exits 1 where it does not fit."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.description, command.usage = _ABOUT, f"{command.prog} CONFIG [--gpu-memory GB] [--json] [flags]"
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("config", metavar="CONFIG", type=Path, help="a run's TOML file, or a model's")
    memory = f"memory of a GPU, in GB of 10^9 bytes; default: that of this machine's smallest GPU, {DEFAULT_GB:g} without one"
    command.add_argument("--gpu-memory", type=_gigabytes, metavar="GB", help=memory)
    add_json(command)
    command.set_defaults(run_command=_run, flags=[], take_rest=take_flags)


def _gigabytes(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: GB, more than 0")
    return value


def _run(parsed: argparse.Namespace, console: Console) -> int:
    gpu_bytes = devices.gpu_bytes() or int(DEFAULT_GB * 1e9) if parsed.gpu_memory is None else int(parsed.gpu_memory * 1e9)
    found = planned(Source.of(parsed.config, parsed.flags), gpu_bytes)
    plan = found.plan
    if parsed.json:
        console.file.write(json_text(plan_tables.as_json(plan, found.notes)) + "\n")
        return exit_codes.DONE if plan.fits else exit_codes.FAILED
    size = f"{total_parameters(plan.architecture) / 1e9:.2f} billion parameters"
    console.print(Text(f"{size}, GPUs of {gpu_bytes / 1e9:.1f} GB; all figures in GB of 10^9 bytes"), soft_wrap=True)
    for table in (plan_tables.trainer_table(plan), plan_tables.engine_table(plan)):
        if table is not None:
            console.print()
            console.print(table)
    console.print(Text(f"\n{plan_tables.LEGEND}"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    for line in plan_tables.verdicts(plan):
        console.print(Text(line, style="" if line.startswith(" ") else "bold red"), soft_wrap=True)
    console.print("It fits." if plan.fits else "It does not fit.")
    return exit_codes.DONE if plan.fits else exit_codes.FAILED
