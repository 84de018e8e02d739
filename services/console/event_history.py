"""Metrics, pushes and marks of a run from its events and metric files, read once for all pages; metrics of the runs beside it."""

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from services.console.run_source import HEALTH, RUN, WEIGHTS, RunSource, SourceAway
from shared.bus import runs
from shared.bus.subjects import RUN_ID
from shared.data.metric_files import MetricDirectory
from shared.schema.message import Message
from shared.schema.service_messages import MetricsWritten, ServiceEvent
from shared.schema.weight_messages import WeightsLive, WeightsPushed
from shared.view.metric_history import MetricHistory, PushHistory, RunMarks, pushes_in

SHOW_EACH = 2000  # Events of a long history after which browsers are notified that there is more
YIELD_EACH = 20_000  # Numbers of a file that are taken before others have their turn


class MetricFiles:
    """The metric files of a run's directory, of all its trainer's roles.

    Args:
        root: the run's directory; what its trainer writes may lie elsewhere, by its config.
    """

    def __init__(self, root: Path) -> None:
        config = runs.frozen(root)
        trained = root if config is None or not config.trained.is_dir() else config.trained
        self._directories = [MetricDirectory(trained / "tensorboard"), MetricDirectory(trained / "tensorboard" / "critic")]

    async def read(self, history: MetricHistory) -> bool:
        """Takes into ``history`` what is new in the files; returns whether anything was."""
        new = False
        for directory in self._directories:
            scalars = directory.read()
            while batch := await asyncio.to_thread(list, itertools.islice(scalars, YIELD_EACH)):
                for item in batch:
                    new |= history.put(item.tag, item.step, item.value, item.at)
        return new

    @property
    def unreadable(self) -> dict[str, str]:
        """Returns the path of each directory whose metrics cannot be read, and why."""
        return {str(each.path): each.unreadable for each in self._directories if each.unreadable}


class EventHistory:
    """The fold of one run's events and metric files. Pages share it: ``source.shared(EventHistory)``."""

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._begin()
        source.followers.append(self.follow)

    def _begin(self) -> None:
        """Begins with nothing read."""
        directory = self._source.directory
        self.metrics, self.pushes, self.marks = MetricHistory(), PushHistory(), RunMarks()
        self.files = MetricFiles(directory) if directory is not None else None
        self._seen, self._life = 0, self._source.life

    async def follow(self) -> Collection[str]:
        """Takes what is new; returns the pages whose data has changed."""
        changed = set[str]()
        if self._life != self._source.life:
            self._begin()
            changed |= {RUN, WEIGHTS, HEALTH}
        if self.files is not None and await self.files.read(self.metrics):
            changed.add(RUN)
        if self._source.live:
            try:
                await self._read_events(changed)
            except SourceAway:
                self._source.feed.touch(*changed)
                raise
        elif RUN in changed:
            for pushed in pushes_in(self.metrics):
                if pushed.version not in self.pushes.versions:
                    self.pushes.push(pushed)
            changed.add(WEIGHTS)
        return changed

    async def _read_events(self, changed: set[str]) -> None:
        stream, count = self._source.names.events_stream, 0
        async for sequence, event in self._source.read(stream, Message, after=self._seen, strict=False):
            self._seen = sequence
            changed |= self._take(event)
            count += 1
            if count % SHOW_EACH == 0:
                self._source.feed.touch(*changed)
                changed.clear()

    def _take(self, event: Message) -> set[str]:
        """Takes one event; returns the pages that show it."""
        match event:
            case MetricsWritten(step=step, values=values, at=at):
                return {RUN} if any([self.metrics.put(tag, step, value, at) for tag, value in values.items()]) else set()
            case WeightsPushed():
                self.pushes.push(event)
                return {RUN, WEIGHTS, HEALTH}
            case WeightsLive():
                self.pushes.live(event)
                return {WEIGHTS}
            case ServiceEvent():
                return ({RUN, HEALTH} if self.marks.take(event) else set()) | ({WEIGHTS} if self.pushes.take(event) else set())
            case _:
                return set()


MOST_RUNS = 8  # Runs whose metrics are kept in memory; who asks for another has the one that was asked for least lately forgotten
FRESH_SECONDS = 2.0  # A run's files are not read again sooner than this: it may still be in progress


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
