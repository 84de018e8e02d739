"""What the pages *Flow* and *Health* read: the newest part of the run's ledger and events, and what its services did."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence

from services.console.run_source import FLOW, HEALTH, NATS, NOT_STARTED, OVERVIEW, SILENT, STORE, RunSource, SourceAway
from shared.bus import runs
from shared.config.run_config import RunConfig
from shared.runtime.host import cores_awaited
from shared.schema.service_messages import ServiceStatus
from shared.view.alarms import HealthView, Symptoms, alarms, disk_room, health_view, memory_room, symptoms
from shared.view.flow_history import FlowHistory
from shared.view.flow_view import FlowReader, FlowView, flow_view
from shared.view.stall import Away, RunSituation, Stall, StallWatch, watched_stall

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

    async def flow(self, window_s: float) -> FlowView:
        """Returns the pipeline, looking back ``window_s`` seconds. Raises SourceAway where nothing is known of it."""
        history, config, now, found = await self._known()
        alarmed = {alarm.kind for alarm in alarms(found, config)}
        return flow_view(history, config, self._statuses(), now, window_s, alarmed, self._wait(config, now), cores_awaited())

    async def health(self) -> HealthView:
        """Returns the health. Raises SourceAway where nothing is known of it."""
        history, config, now, found = await self._known()
        wait = None if history.finished else self._wait(config, now)
        return health_view(history, config, self._statuses(), found, wait.words(now) if wait is not None else "")

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
        history, now, away = self._reader.history, time.time(), {name: away.why for name, away in self._away().items()}
        found = symptoms(history, self._statuses(), now, away, disk_room(self._source.directory), memory_room())
        return history, self._source.config, now, found

    def _statuses(self) -> list[ServiceStatus]:
        """Returns the statuses of services; those of a bus that is away are of the past."""
        return list(self._source.statuses) if self._source.connected else []

    def _away(self) -> dict[str, Away]:
        """Returns what is away that was there: the start of a run is no alarm."""
        return {name: away for name, away in self._source.away.items() if away.why != NOT_STARTED}

    def _wait(self, config: RunConfig, now: float) -> Stall | None:
        """Returns what a run that is under way waits for."""
        source, statuses, away = self._source, self._statuses(), self._away()
        if source.at_rest or source.phase not in (None, runs.RUNNING) or not (statuses or SERVERS & away.keys()):
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
            self._reader, self._life = FlowReader(source.run, source.read, last), source.life
            self._read.clear()
        changed = await self._reader.catch_up()
        self._read.set()
        return (FLOW, HEALTH) if changed else ()

    def _look(self, statuses: Sequence[ServiceStatus]) -> None:
        if self._reader is not None:
            self._reader.observe(statuses, time.time())
        if (wait := self.wait()) != self._told:  # its beginning is known before it is asked for
            self._told = wait
            self._source.feed.touch(OVERVIEW, FLOW)
