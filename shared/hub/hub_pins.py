"""What the names of a run were pinned to when it began: a resumed run goes on with the same files wherever the branch has moved since.

A run on this machine has its frozen config in its directory, any other on the bus.
"""

from __future__ import annotations

from pathlib import Path

from shared.bus import runs
from shared.bus.connection import Bus
from shared.config.run_config import RunConfig
from shared.hub.hub_resolve import found


def read(directory: Path) -> dict[str, str] | None:
    """The pins that a run's directory keeps; None where it keeps none."""
    config = runs.frozen(directory)
    return None if config is None else of(config)


async def on_bus(bus: Bus, run: str) -> dict[str, str]:
    """The pins of the run of that name on a bus; none where there is no such run."""
    try:
        return of(await runs.load(bus, run))
    except runs.NoSuchRun:
        return {}


def of(config: RunConfig) -> dict[str, str]:
    """Name as it was asked for → name with its commit, for the names of a pinned config."""
    return {str(name.unpinned): str(name) for name in found(config) if name.commit is not None}
