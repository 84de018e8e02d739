"""What a run's events and metric files tell: its metrics, pushes and marks, read once for all pages and kept up to date."""

import asyncio
import itertools
from collections.abc import Collection
from pathlib import Path

from services.console.change_feed import HEALTH, RUN, WEIGHTS
from services.console.run_source import RunSource, SourceAway
from shared.bus import runs
from shared.data.event_files import EventDirectory
from shared.history.metric_history import MetricHistory
from shared.history.push_history import PushHistory, pushes_in
from shared.history.run_marks import RunMarks
from shared.schema.message import Message
from shared.schema.service_messages import MetricsWritten, ServiceEvent
from shared.schema.weight_messages import WeightsLive, WeightsPushed

SHOW_EACH = 2000
"""Events of a long history after which browsers are told that there is more."""

YIELD_EACH = 20_000
"""Numbers of a file that are taken before others have their turn."""


class MetricFiles:
    """The metric files of a run's directory, of all its trainer's roles.

    Args:
        root: the run's directory; what its trainer writes may lie elsewhere, by its config.
    """

    def __init__(self, root: Path) -> None:
        config = runs.frozen(root)
        trained = root if config is None or not config.trained.is_dir() else config.trained
        self._directories = [EventDirectory(trained / "tensorboard"), EventDirectory(trained / "tensorboard" / "critic")]

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
        """Returns the path of each file that is damaged, and why nothing more is read of it."""
        return {str(each.path / name): why for each in self._directories for name, why in each.unreadable.items()}


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
