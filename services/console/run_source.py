"""What all pages read: the run's config, bus, store, directory and services, which of them is away, and the feed of changes to browsers.

Nothing here fails because something is down: it is noted in `RunSource.away`, tried again, and taken out when it is back. A killed service
leaves its status in the registry until its TTL: it is away as soon as its status is no longer renewed. Times are compared with this
process's own clock alone; other machines' clocks may differ.
"""

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors
import structlog
from redis.exceptions import RedisError

from shared.accounts.permissions import CONSOLE, ROLES, user_name
from shared.bus import runs, streams
from shared.bus.bus_errors import BUS_ERRORS, TRANSIENT
from shared.bus.connection import Bus
from shared.bus.registry import ENVIRONMENT, Registry
from shared.bus.streams import Entry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.runtime import addresses
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.schema.service_messages import ServiceStatus
from shared.store.payload_store import Store
from shared.view.live_services import SILENCE_SHARE, Heartbeats, needed
from shared.view.stall import NATS, STORE, Away, Stall, reported_wait

# What the feed tells of: the pages, and what stands above them all
OVERVIEW, RUN, FLOW, WEIGHTS, SAMPLES, HEALTH, CLIENTS = PAGES = ("overview", "run", "flow", "weights", "samples", "health", "clients")

PAUSE_SECONDS = 1.0  # The least time between two events of one browser
HEARTBEAT_SECONDS = 5.0


class ChangeFeed:
    """A revision for each page, which grows when the page's data has changed.

    It begins with the time: browsers that were connected to an earlier life of the console see that all has changed.
    """

    def __init__(self) -> None:
        self.revisions = dict.fromkeys(PAGES, int(time.time() * 1000))
        self._changed = asyncio.Event()

    def touch(self, *pages: str) -> None:
        """Notes that the data of ``pages`` has changed."""
        for page in pages:
            self.revisions[page] += 1
        if pages:
            self._changed.set()
            self._changed = asyncio.Event()

    async def events(self) -> AsyncIterator[str]:
        """Yields the events of one browser, until it is closed: all revisions first, then those that have changed, and heartbeats."""
        sent: dict[str, int] = {}
        while True:
            changed = self._changed
            new = {page: revision for page, revision in self.revisions.items() if sent.get(page) != revision}
            if new:
                sent |= new
                yield f"data: {json.dumps(new)}\n\n"
                await asyncio.sleep(PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await changed.wait()
                continue
            yield "event: heartbeat\ndata: {}\n\n"


NOT_STARTED = "not started yet"  # Why a kind of service is away that was never seen
GONE = "its status is gone from the registry"  # Why one is away that was there before
SILENT = "silent: its status is no longer renewed"  # Why an instance is away that is in the registry all the same
NOT_AT_WORK = ("starting", "stopping", "failed")


class AbsentServices:
    """The services heard so far."""

    def __init__(self) -> None:
        self._heartbeats, self._worked, self._kinds = Heartbeats(), set[str](), dict[str, float]()

    def look(self, config: RunConfig | None, statuses: Sequence[ServiceStatus], clock: float, now: float) -> dict[str, Away]:
        """Returns what is away: an instance that is silent or starts again, or a kind of service of which there is none.

        Args:
            config: None while no services are expected. statuses: what the registry holds. clock: monotonic seconds. now: seconds since
                the epoch.
        """
        services = [status for status in statuses if status.service != ENVIRONMENT]
        self._heartbeats.observe(services, clock, now)
        self._worked |= {status.instance for status in services if status.state not in NOT_AT_WORK}
        absent = dict[str, Away]()
        silent = {} if config is None else self._heartbeats.silent(config.bus.registry_ttl * SILENCE_SHARE)
        for status in services:
            came = self._heartbeats.heard[status.instance].came
            self._kinds[status.service] = max(came, self._kinds.get(status.service, came))
            if status.instance in silent:
                absent[status.instance] = Away(came, SILENT)
            elif status.instance in self._worked and status.state in NOT_AT_WORK:
                absent[status.instance] = Away(came, f"{status.state} again" if status.state == "starting" else status.state)
        if config is None:
            return {}
        for kind in set(needed(config)) - {status.service for status in services}:
            absent[kind] = Away(self._kinds.get(kind, now), GONE if kind in self._kinds else NOT_STARTED)
        return absent


LEDGER, CONFIG, FILE = "the ledger", "the config on the bus", "a file"  # What may be away besides the servers and services
POLL_SECONDS = 1.0
LOOK_SECONDS = 5.0  # The deadline of one look at bus or store
READ_SECONDS = 10.0  # The time without progress after which reading a stream is given up
Shared = TypeVar("Shared")

# Reads what is new in the ledger or the events since its last call; returns the pages whose data has changed by it
Follower = Callable[[], Awaitable[Collection[str]]]


class SourceAway(MyxoError):
    """What a page asks for cannot be read now; the text says what is away and since when."""


class RunSource:
    """A run as the console sees it.

    Args:
        run: its id. nats_url, redis_url: None where there is none, of a run of which only the directory is left.
        directory: the run's directory, where this machine has it. at_rest: its bus is served for the console alone, and no service is
            at work.

    Attributes:
        config: None until it is known. statuses: of the live services. reported: what the run waits for, as its launcher reports.
        phase, failure: as `runs.phase_and_reason` gives them.
        trained: steps when the bus was last connected. life: when the run on the bus began, which changes where it is begun anew under its
            name; None until it is known. Whoever folds streams begins anew with it.
        away: server or service → since when, and why. feed: what browsers hear. followers: called when there is something new, each
            after `connected`. lookers: called with the statuses of the live services at each look.
    """

    def __init__(self, run: str, nats_url: str | None, redis_url: str | None, directory: Path | None, *, at_rest: bool = False) -> None:
        self.run, self.names, self.directory = run, Subjects(run), directory
        self.config: RunConfig | None = None if directory is None else runs.frozen(directory)
        self.live, self.at_rest = nats_url is not None, at_rest
        self.statuses: list[ServiceStatus] = []
        self.reported: Stall | None = None
        self.phase: str | None = None
        self.failure = ""
        self.trained: int | None = None
        self.life: str | None = None
        self.away: dict[str, Away] = {}
        self.feed = ChangeFeed()
        self.followers: list[Follower] = []
        self.lookers: list[Callable[[Sequence[ServiceStatus]], None]] = []
        self._nats_url, self._redis_url = nats_url, redis_url
        self._bus: Bus | None = None
        self._store: Store | None = None
        self._services = AbsentServices()
        self._shared: dict[object, Any] = {}
        self._news = asyncio.Event()
        self._news.set()
        self._log = structlog.get_logger()

    # --- for pages

    @property
    def connected(self) -> bool:
        """Whether the bus is there."""
        return self._bus is not None and self._bus.connection.is_connected and NATS not in self.away

    @property
    def over(self) -> bool:
        """Whether the run has ended, or is at rest."""
        return self.at_rest or self.phase in runs.ENDS

    def bus(self) -> Bus:
        """Returns the bus. Raises SourceAway while it is not connected."""
        if self._bus is None or not self._bus.connection.is_connected:
            raise SourceAway(self._words(NATS))
        return self._bus

    def store(self) -> Store:
        """Returns the store of payloads. Raises SourceAway while it does not answer."""
        if self._store is None or STORE in self.away:
            raise SourceAway(self._words(STORE))
        return self._store

    def shared(self, kind: "Callable[[RunSource], Shared]") -> Shared:
        """Returns what several pages read together: the one ``kind`` of this source, made when it is first asked for."""
        if kind not in self._shared:
            self._shared[kind] = kind(self)
        found: Shared = self._shared[kind]
        return found

    async def read(
        self, stream: str, model: type[Entry], subject: str = ">", *, after: int = 0, strict: bool = True
    ) -> AsyncGenerator[tuple[int, Entry], None]:
        """Yields (sequence, message) as `streams.read` does. Raises SourceAway where the bus breaks off, BadMessage."""
        bus = self.bus()
        try:
            async for item in streams.read(bus, stream, model, subject, deadline=READ_SECONDS, after=after, strict=strict):
                yield item
        except (DeadlineExceeded, nats.errors.Error, nats.js.errors.Error, *TRANSIENT) as error:
            raise SourceAway(f"{stream} could not be read to its end: {str(error) or type(error).__name__}") from error

    async def ledger_end(self) -> int:
        """Returns the sequence of the ledger's newest record. Raises SourceAway."""
        bus = self.bus()
        try:
            return await streams.last_sequence(bus, self.names.ledger_stream, deadline=READ_SECONDS)
        except BUS_ERRORS as error:
            raise SourceAway(f"the state of the ledger could not be read: {str(error) or type(error).__name__}") from error

    def _words(self, what: str) -> str:
        away = self.away.get(what)
        if away is not None:
            return f"{what} is away for {time.time() - away.since:.0f} s: {away.why}"
        return f"{what} is not connected yet" if self.live else f"{what} is not there: this run is read from its directory"

    # --- what runs beside them

    async def keep(self) -> None:
        """Looks at everything again and again, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(), name="console follows")
                if self.live:
                    tasks.create_task(self._watch(NATS, self._look_at_bus), name="console looks at the bus")
                    tasks.create_task(self._watch(STORE, self._look_at_store), name="console looks at the store")
        finally:
            await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        if self._bus is not None:
            await self._bus.close()
        if self._store is not None:
            await self._store.close()

    async def _watch(self, what: str, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await look()
                self._note(what, None)
            except TimeoutError:
                self._note(what, f"no answer within {LOOK_SECONDS:g} s")
            except (RedisError, *BUS_ERRORS) as error:
                self._note(what, str(error) or type(error).__name__)
            await asyncio.sleep(POLL_SECONDS)

    def _note(self, what: str, why: str | None, since: float | None = None) -> None:
        """Notes that something is away for a reason, ``since`` then (None: now), or that it is there (no reason)."""
        if why is None:
            if self.away.pop(what, None) is not None:
                self._news.set()
                self._log.info("back", what=what)
                self.feed.touch(OVERVIEW, HEALTH, FLOW)
        elif what not in self.away or self.away[what].why != why:
            began = self.away[what].since if what in self.away else since or time.time()
            self.away[what] = Away(began, why)
            self._log.warning("away", what=what, why=why)
            self.feed.touch(OVERVIEW, HEALTH, FLOW)

    async def _look_at_bus(self) -> None:
        bus = self._bus or await self._connected()
        if not bus.connection.is_connected:
            raise SourceAway("the connection broke, and is being restored")
        await self._look_at_life(bus)
        registry = Registry(bus, self.run)
        statuses, self.reported = await registry.alive(), reported_wait(await registry.launcher())
        phase, failure = await runs.phase_and_reason(bus, self.run, deadline=LOOK_SECONDS)
        if (phase, failure) != (self.phase, self.failure):
            self.phase, self.failure = phase, failure
            self.feed.touch(OVERVIEW, HEALTH)
        for looker in self.lookers:
            looker(statuses)
        if [one.state_since for one in statuses] != [one.state_since for one in self.statuses]:
            await self._load(bus)  # services that begin may have another config; those that ended report no steps any more
        if statuses != self.statuses:
            self.statuses = statuses
            self.feed.touch(OVERVIEW, FLOW, HEALTH, WEIGHTS)
        running = self.phase == runs.RUNNING and not self.at_rest
        absent = self._services.look(self.config if running else None, self.statuses, time.monotonic(), time.time())
        for name in (self.away.keys() - {NATS, STORE, LEDGER, CONFIG, FILE}) - absent.keys():
            self._note(name, None)
        for name, away in absent.items():
            self._note(name, away.why, away.since)

    async def _look_at_life(self, bus: Bus) -> None:
        """Learns whether the run is still the one that was read; of one that was begun anew under its name, or repaired, everything is
        read anew."""
        if (life := await streams.life(bus, self.names.ledger_stream, LOOK_SECONDS)) == self.life:
            return
        if self.life is not None:
            self._log.info("run_begun_anew", life=life)
            await self._load(bus)
            self._services = AbsentServices()
            self._news.set()
            self.feed.touch(*self.feed.revisions)
        self.life = life

    async def _load(self, bus: Bus) -> None:
        try:
            self.config = await runs.load(bus, self.run)
            self._note(CONFIG, None)
        except runs.UnreadableRun as error:
            if self.directory is None:
                raise
            self.config = runs.copy_instead(self.directory, error)
            self._note(CONFIG, f"{error}; until then its directory's copy stands for it")
        self.trained = await runs.trained_steps(bus, self.run)

    async def _connected(self) -> Bus:
        """Connects, reads the config, and has the bus tell of what is new."""
        assert self._nats_url is not None
        user = urlsplit(self._nats_url.split(",")[0]).username or ""  # of the role whose account it is; else the console's own
        role = next((role for role in ROLES if user_name(role, self.run) == user), CONSOLE)
        bus = await Bus.connect(self._nats_url, f"{self.run}/console", LOOK_SECONDS / 2, inbox=self.names.inbox(role))
        try:
            await self._load(bus)
            self._redis_url = self._redis_url or addresses.still_there(await runs.store_url(bus, self.run))

            async def on_news(_message: object) -> None:
                self._news.set()

            for subject in (self.names.ledger(">"), *(self.names.event(plane, ">") for plane in ("weights", "trainer", "service"))):
                await bus.connection.subscribe(subject, cb=on_news)
        except BaseException:
            await bus.close()
            raise
        self._bus = bus
        self._news.set()
        self.feed.touch(*self.feed.revisions)
        return bus

    async def _look_at_store(self) -> None:
        if self._redis_url is None:
            if self.over:  # what is kept of a run that is over lies in its directory
                return
            raise SourceAway("its address is not known yet")
        if self._store is None:
            self._store = Store(self._redis_url, self.run)
        await self._store.ping(deadline=LOOK_SECONDS / 2)

    def follow_again(self) -> None:
        """Has the followers called once more: one of them has left something for later."""
        self._news.set()

    async def _follow(self) -> None:
        """Calls the followers when there is something new: at the start, at each message, when the bus is back, and after a failure."""
        while True:
            await self._news.wait()
            self._news.clear()
            failed = dict[str, str]()
            for follower in self.followers:
                try:
                    self.feed.touch(*await follower())
                except SourceAway:
                    self._news.set()
                except (MyxoError, OSError, sqlite3.Error) as error:
                    self._news.set()
                    failed.setdefault(LEDGER if isinstance(error, MyxoError) else FILE, str(error))
            for what in (LEDGER, FILE):
                self._note(what, failed.get(what))
            await asyncio.sleep(POLL_SECONDS)
