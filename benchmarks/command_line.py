"""The command line of a benchmark: numbers with defaults, and a file for the figures."""

import argparse
import json
import os
from collections import Counter
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from shared.config.devices import VISIBLE, of_each_gpu, visible_gpus


def parsed(about: str | None, *, writes: bool = False, **numbers: tuple[int, str]) -> argparse.Namespace:
    """Returns the options of the command line. ``numbers``: the default of each and what it says; beside them there is ``--json FILE``, and
    where the benchmark ``writes`` a page's table ``--write``."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, words) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{words} (default {default})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    if writes:
        parser.add_argument("--write", action="store_true", help="put the figures of the repository into the docs; nothing is measured")
    return parser.parse_args()


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Writes figures with when and where they were measured; without a path, nowhere."""
    if path is not None:
        path.write_text(json.dumps({**conditions(), **figures}, indent=2) + "\n")


def conditions() -> dict[str, Any]:
    """Returns when and where something is measured."""
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count(), "load": os.getloadavg()[0], **told_gpus()}


@cache
def told_gpus() -> dict[str, str]:
    """Returns which GPUs this machine has, as ``gpu``; nothing where it has none."""
    counted = Counter(of_each_gpu("name"))
    return {"gpu": ", ".join(f"{count} × {name}" for name, count in counted.items())} if counted else {}


def first_gpus(count: int) -> list[str]:
    """Returns so many GPUs, as `VISIBLE` names them: the first that it lists, where it is set."""
    return visible_gpus()[:count] if VISIBLE in os.environ else [str(number) for number in range(count)]


def machine() -> str:
    """Returns in words what the figures were measured on."""
    return f"{os.cpu_count()} cores, {os.getloadavg()[0]:.1f} processes wanted one in the last minute"
