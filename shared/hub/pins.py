"""What the names of a run were pinned to when it began: a resumed run goes on with the same files wherever the branch has moved since.

A run on this machine has it in its directory (``hub.json``), any other in its frozen config on the bus.
"""

from __future__ import annotations

import json
from pathlib import Path

from shared import runs
from shared.bus import Bus
from shared.config import RunConfig
from shared.hub.resolve import found

FILE = "hub.json"


def write(directory: Path, config: RunConfig) -> None:
    """Keeps the pins of a run that is about to begin or go on in its directory."""
    path = directory / FILE
    pins = of(config)
    if pins:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(pins, indent=1) + "\n")
        partial.replace(path)
    else:
        path.unlink(missing_ok=True)


def read(directory: Path) -> dict[str, str] | None:
    """The pins that a run's directory keeps; None where it keeps none."""
    try:
        pins = json.loads((directory / FILE).read_text())
    except (OSError, ValueError):
        return None
    return pins if isinstance(pins, dict) else None


async def on_bus(bus: Bus, run: str) -> dict[str, str]:
    """The pins of the run of that name on a bus; none where there is no such run."""
    try:
        return of(await runs.load(bus, run))
    except runs.NoSuchRun:
        return {}


def of(config: RunConfig) -> dict[str, str]:
    """Name as it was asked for → name with its commit, for the names of a pinned config."""
    return {str(name.unpinned): str(name) for name in found(config) if name.commit is not None}
