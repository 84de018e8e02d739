"""Arguments that several commands share, and commands that a service implements in a module of its own."""

import argparse
import importlib.util
import math
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from shared.runtime.errors import BadInput


def add_run(command: argparse.ArgumentParser, metavar: str = "RUN", besides: str = "") -> None:
    """Adds RUN and --dir. ``besides``: what else may stand in its place."""
    command.add_argument("run", metavar=metavar, help=f"the run's id, or its directory{besides}")
    command.add_argument("--dir", type=Path, default=Path("runs"), help="where runs lie (default runs)")


def add_json(command: argparse.ArgumentParser, text: str = "as one JSON object") -> None:
    """Adds --json."""
    command.add_argument("--json", action="store_true", help=text)


def positive(text: str) -> float:
    """Reads a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: more than 0")
    return value


def number(text: str) -> float:
    """Reads a number."""
    value = float(text)
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text}: a number")
    return value


def count(text: str) -> int:
    """Reads a whole number that is not negative."""
    value = int(text)
    if not 0 <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text}: from 0 to {(1 << 31) - 1}")
    return value


MODULES = {
    "simulate": "services.buffer.simulate_command",
    "convert": "services.trainer.convert_command",
    "replay": "services.trainer.batch_replay",
}


def declare_tool(command: argparse.ArgumentParser) -> None:
    """Declares that all words behind the command are for the tool."""
    command.add_argument("options", nargs=argparse.REMAINDER)
    command.set_defaults(run_command=run_tool)


def module_command(module: str, options: list[str]) -> list[str]:
    """Returns the command of a service's module. Raises BadInput where the code of its service is not here."""
    package = ".".join(module.split(".")[:2])
    if importlib.util.find_spec(package) is None:
        image, words = package.rpartition(".")[2], " ".join([module, *options])
        raise BadInput(f"this runs in the {image}'s image: docker compose run --rm --no-deps {image} python -m {words}")
    return [sys.executable, "-m", module, *options]


def run_tool(parsed: argparse.Namespace, console: Console) -> int:
    """Runs the tool to its end; returns its exit code. Raises BadInput as `module_command`."""
    process = subprocess.Popen(module_command(MODULES[parsed.command], parsed.options))
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:  # a terminal sends it to both: let the work end by itself
            continue
