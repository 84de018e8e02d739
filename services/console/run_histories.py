"""What the pages read together of a run, kept up to date by `RunSource`: metrics, pushes and marks; the pipeline; groups and samples."""

import asyncio
import contextlib
import itertools
import math
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from fastapi import Query
from pydantic import BaseModel

from services.console.run_source import (
    FLOW,
    HEALTH,
    NATS,
    NOT_STARTED,
    OVERVIEW,
    RUN,
    SAMPLES,
    SILENT,
    STORE,
    WEIGHTS,
    RunSource,
    SourceAway,
)
from shared.bus import runs
from shared.bus.subjects import RUN_ID
from shared.config.run_config import RunConfig
from shared.data.metric_files import MetricDirectory
from shared.data.rollout_files import DIRECTORY, RolloutRecord
from shared.runtime.host import cores_awaited
from shared.schema.ledger import LedgerRecord
from shared.schema.message import Message
from shared.schema.service_messages import MetricsWritten, ServiceEvent, ServiceStatus
from shared.schema.weight_messages import WeightsLive, WeightsPushed
from shared.view.alarms import HealthView, Symptoms, alarms, health_view, standing
from shared.view.flow_history import REWARD, FlowHistory
from shared.view.flow_view import WINDOWS, FlowReader, FlowView, flow_view
from shared.view.group_history import GroupRecord
from shared.view.group_index import GroupIndex, KeptResponses
from shared.view.metric_history import MetricHistory, PushHistory, RunMarks, pushes_in
from shared.view.stall import Away, RunSituation, Stall, StallWatch, watched_stall

SHOW_EACH = 2000  # Events of a long history after which browsers are notified that there is more
YIELD_EACH = 20_000  # Numbers of a file that are taken before others have their turn


class MetricFiles:
    """The metric files of a run's directory, of all its trainer's roles.

    Args:
        root: the run's directory, or a copy; what its trainer writes may lie elsewhere, by its config.
    """

    def __init__(self, root: Path) -> None:
        config = runs.frozen(root)
        here = config is None or config.trained.resolve() == config.run.root.resolve() or not config.trained.is_dir()
        trained = root if config is None or here else config.trained
        self._directories = [MetricDirectory(trained / "tensorboard"), MetricDirectory(trained / "tensorboard" / "critic")]

    async def read(self, history: MetricHistory) -> bool:
        """Takes into ``history`` what is new in the files; returns whether anything was."""
        new = False
        scalars = itertools.chain.from_iterable(directory.read() for directory in self._directories)
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
        known, live = bool(self.pushes.versions), self._source.live
        try:
            if live:
                await self._read_events(changed)
        except SourceAway:
            self._source.feed.touch(*changed)
            raise
        finally:
            if (self.pushes.versions and not known) if live else RUN in changed:
                below = min(self.pushes.versions) if live else math.inf  # the stream has dropped those before
                for pushed in pushes_in(self.metrics):
                    if pushed.version < below and pushed.version not in self.pushes.versions:
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
        self._known: OrderedDict[tuple[str, int], _OtherRun] = OrderedDict()

    async def metrics(self, name: str) -> MetricHistory | None:
        """Returns the metrics of the run ``name``; None where there is no such run beside this one."""
        if self._directory is None or name not in runs_beside(self._directory):
            return None
        root = self._directory.parent / name
        life = name, (root / runs.FROZEN).stat().st_mtime_ns  # a run that is begun anew has its config written anew
        run = self._known.setdefault(life, _OtherRun(MetricFiles(root)))
        self._known.move_to_end(life)
        while len(self._known) > MOST_RUNS:
            self._known.popitem(last=False)
        async with run.lock:
            if time.monotonic() - run.read_at > FRESH_SECONDS:
                await run.files.read(run.metrics)
                run.read_at = time.monotonic()
        return run.metrics


def runs_beside(directory: Path | None) -> list[str]:
    """Returns the names of the other runs in the directory that a run's own one lies in."""
    if directory is None or not os.access(directory.parent, os.R_OK):
        return []
    found = (path for path in directory.parent.iterdir() if path != directory and RUN_ID.match(path.name))
    return sorted(path.name for path in found if os.path.isfile(path / runs.FROZEN))  # not another user's


SERVERS = {NATS, STORE}

FIRST_READ_SECONDS = 10.0  # The time that an answer waits for the first reading of the ledger: half of one would be a wrong answer


class RunPipeline:
    """The pipeline of a run, which the source keeps up to date; it keeps its last answers while the bus is away."""

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._reader: FlowReader | None = None
        self._life: str | None = None
        self._read = asyncio.Event()
        self._waits = StallWatch()
        self._told: Stall | None = None
        source.followers.append(self._follow)
        source.lookers.append(self._look)

    async def flow(
        self, window: Annotated[float, Query(ge=10, le=WINDOWS[-1], description="seconds to look back")] = WINDOWS[1]
    ) -> FlowView:
        """Returns the pipeline over the last ``window`` seconds: where groups are, what services do, who waits for whom and what would
        help. Raises SourceAway where nothing is known of it."""
        history, config, now, found = await self._known()
        alarmed = {alarm.kind for alarm in alarms(found, config)}
        return flow_view(history, config, self._statuses(), now, window, alarmed, self._wait(config, now), cores_awaited())

    async def health(self) -> HealthView:
        """Returns alarms with what they mean and what to do, services with their restarts and errors, groups that died, what services told.
        Raises SourceAway where nothing is known of it."""
        history, config, now, found = await self._known()
        wait = None if history.finished else self._wait(config, now)
        return health_view(history, config, self._statuses(), found, wait.words(now, clock=False) if wait is not None else "")

    def wait(self) -> Stall | None:
        """Returns what a run that is under way waits for; None where nothing is known of it."""
        return None if self._source.config is None else self._wait(self._source.config, time.time())

    async def _known(self) -> tuple[FlowHistory, RunConfig, float, Symptoms]:
        if self._source.live and not self._read.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._read.wait(), FIRST_READ_SECONDS)
        if self._reader is None or self._source.config is None or not self._read.is_set():
            self._source.bus()
            raise SourceAway("the ledger has not been read yet")
        source, history, away = self._source, self._reader.history, {name: away.why for name, away in self._away().items()}
        found = standing(history, self._statuses(), away, source.directory, live=not source.over)
        if found.finished and (rewards := source.shared(EventHistory).metrics.series.get(REWARD)) is not None:  # the files have all
            found = replace(found, rewards=dict(zip(rewards.steps.tolist(), rewards.values.tolist(), strict=True)))
        return history, self._source.config, history.newest if source.over else time.time(), found

    def _statuses(self) -> list[ServiceStatus]:
        """Returns the statuses of services; those of a bus that is away are of the past."""
        return list(self._source.statuses) if self._source.connected else []

    def _away(self) -> dict[str, Away]:
        """Returns what is away that was there: the start of a run is no alarm."""
        return {name: away for name, away in self._source.away.items() if away.why != NOT_STARTED}

    def _wait(self, config: RunConfig, now: float) -> Stall | None:
        """Returns what a run that is under way waits for."""
        source, statuses, away = self._source, self._statuses(), self._away()
        if source.over or not (statuses or SERVERS & away.keys()):
            return None
        silent = {name: gone.since for name, gone in away.items() if gone.why == SILENT}
        errors = self._reader.history.failures.errors if self._reader is not None else {}
        reported = source.reported if source.connected else None
        situation = RunSituation.of(config, statuses, away=away, silent=silent, errors=errors, reported=reported)
        return watched_stall(self._waits, situation, now)

    async def _follow(self) -> Collection[str]:
        """Reads what is new; begins anew where the run did. Raises SourceAway."""
        source = self._source
        last = await source.ledger_end()
        if self._reader is None or last < self._reader.sequence or self._life != source.life:
            self._reader, self._life, self._waits = FlowReader(source.run, source.read, last), source.life, StallWatch()
            self._read.clear()
        changed = await self._reader.catch_up()
        self._read.set()
        return (FLOW, HEALTH) if changed else ()

    def _look(self, statuses: Sequence[ServiceStatus]) -> None:
        if self._reader is not None and not self._source.over:
            self._reader.observe(statuses, time.time())
        if (wait := self.wait()) != self._told:  # its beginning is known before it is asked for
            self._told = wait
            self._source.feed.touch(OVERVIEW, FLOW)


RECORDS = 256  # Ledger records that are folded together
PIECE_SECONDS = 2.0  # The time after which others have their turn


class IndexProgress(BaseModel):
    """How much of the history has been read: ``read`` of ``of`` ledger records; ``admitted`` groups by then.

    damaged: lines of kept responses that are cut off or no record. problem: why they cannot be read at all. from_directory: there is no
    ledger; the kept responses are all there is.
    """

    read: int
    of: int
    admitted: int
    damaged: int
    problem: str
    from_directory: bool


class RunIndex:
    """The groups of a run, kept up to date by `RunSource`. ``groups``: the index; ``kept``: None without the run's directory."""

    def __init__(self, source: RunSource) -> None:
        self._source, self._life, self._end = source, source.life, 0
        self._kept_lock, self._problem, self._broke = asyncio.Lock(), "", ""
        self._begin()
        source.followers.append(self.follow)

    def _begin(self) -> None:
        """Begins with nothing read."""
        source, self.groups = self._source, GroupIndex()
        self.kept = None if source.directory is None else KeptResponses(source.directory / DIRECTORY, self.groups, not source.live)

    def reading(self) -> IndexProgress:
        """Returns how far the index is."""
        return IndexProgress(
            read=self.groups.sequence,
            of=max(self._end, self.groups.sequence),
            admitted=self.groups.history.admitted,
            damaged=0 if self.kept is None else self.kept.torn,
            problem=self._problem,
            from_directory=not self._source.live,
        )

    async def follow(self) -> Collection[str]:
        """Takes what is new. Raises SourceAway, BadMessage; sqlite3.Error where the disk is full, say: the index, which may be torn, begins
        anew, and the error stands until it is whole again."""
        before = self.groups, self.groups.revision
        try:
            if self._source.live:
                await self._read_ledger()
            await self._update_kept()
            if self.groups.sequence < self._end:
                self._source.follow_again()
            else:
                self._broke = ""
        except sqlite3.Error as error:
            self._broke = f"the index of groups in TMPDIR, else /var/tmp: {error}"
            self._begin()
        changed = [SAMPLES] if (self.groups, self.groups.revision) != before else []
        if self._broke:
            self._source.feed.touch(*changed)
            raise sqlite3.OperationalError(self._broke)
        return changed

    async def _read_ledger(self) -> None:
        """Takes what is new, for `PIECE_SECONDS`. A ledger that was made anew is read from its beginning."""
        source, records = self._source, list[tuple[int, LedgerRecord]]()
        self._end = await source.ledger_end()
        if self._life not in (None, source.life) or self._end < self.groups.sequence:
            self._begin()
        groups, self._life, until = self.groups, source.life, time.monotonic() + PIECE_SECONDS
        if groups.sequence == self._end:
            return
        async with contextlib.aclosing(source.read(source.names.ledger_stream, LedgerRecord, after=groups.sequence)) as reading:
            async for entry in reading:
                records.append(entry)
                if len(records) == RECORDS:
                    await asyncio.to_thread(groups.apply, records)
                    records = []
                    if time.monotonic() > until:
                        return
        if records:
            await asyncio.to_thread(groups.apply, records)

    async def kept_record(self, group: GroupRecord) -> RolloutRecord | None:
        """Returns a group's kept responses; None where none are kept. They may have been written after the ledger's last record."""
        if self.kept is None:
            return None
        if self.groups.kept(group.group, group.attempt) is None:
            await self._update_kept()
        return await asyncio.to_thread(self.kept.record, group)

    async def _update_kept(self) -> None:
        if self.kept is None:
            return
        async with self._kept_lock:
            try:
                await asyncio.to_thread(self.kept.update)
                self._problem = ""
            except OSError as error:
                self._problem = f"the kept responses cannot be read: {error}"
