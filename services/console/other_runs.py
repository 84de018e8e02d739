"""The runs that lie beside a run's directory, whose curves are drawn over its own."""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from services.console.event_history import MetricFiles
from services.console.run_source import RunSource
from shared.bus import runs
from shared.bus.subjects import RUN_ID
from shared.history.metric_history import MetricHistory

MOST_RUNS = 8
"""Runs whose metrics are kept in memory; who asks for another has the one that was asked for least lately forgotten."""

FRESH_SECONDS = 2.0
"""A run's files are not read again sooner than this: it may still be going on."""


@dataclass
class _OtherRun:
    files: MetricFiles
    metrics: MetricHistory = field(default_factory=MetricHistory)
    read_at: float = -FRESH_SECONDS
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class OtherRuns:
    """Reads the metric files of other runs. Pages share it: ``source.shared(OtherRuns)``."""

    def __init__(self, source: RunSource) -> None:
        self._directory = source.directory
        self._known: OrderedDict[str, _OtherRun] = OrderedDict()

    async def metrics(self, name: str) -> MetricHistory | None:
        """Returns the metrics of the run ``name``; None where there is no such run beside this one."""
        if self._directory is None or name not in runs_beside(self._directory):
            return None
        run = self._known.setdefault(name, _OtherRun(MetricFiles(self._directory.parent / name)))
        self._known.move_to_end(name)
        while len(self._known) > MOST_RUNS:
            self._known.popitem(last=False)
        async with run.lock:
            if time.monotonic() - run.read_at > FRESH_SECONDS:
                await run.files.read(run.metrics)
                run.read_at = time.monotonic()
        return run.metrics


def runs_beside(directory: Path | None) -> list[str]:
    """Returns the names of the other runs in the directory that a run's own one lies in."""
    if directory is None or not directory.parent.is_dir():
        return []
    found = (path for path in directory.parent.iterdir() if path != directory and RUN_ID.match(path.name))
    return sorted(path.name for path in found if (path / runs.FROZEN).is_file())
