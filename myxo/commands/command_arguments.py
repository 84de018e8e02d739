"""The arguments that several commands share."""

import argparse
import math
from pathlib import Path


def add_run(command: argparse.ArgumentParser) -> None:
    """Adds RUN and --dir."""
    command.add_argument("run", metavar="RUN", help="the run's id, or its directory")
    command.add_argument("--dir", type=Path, default=Path("runs"), help="where runs lie (default runs)")


def add_json(command: argparse.ArgumentParser, text: str = "as one JSON object") -> None:
    """Adds --json."""
    command.add_argument("--json", action="store_true", help=text)


def seconds(text: str) -> float:
    """Reads a time in seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: more than 0 seconds")
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
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: at least 0")
    return value
