"""Connects to a run's bus and store: servers that the environment names, the live run's own, or its stored files served for the moment."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import nats.errors
from redis.exceptions import RedisError

from myxo.run.run_directory import READING, RunDirectory, ServerUrls, checkpoints, find, no_such_run
from shared.accounts.permissions import CONSOLE, OPERATOR, rights_of
from shared.bus import runs, streams
from shared.bus.connection import TRANSIENT, Bus, BusUnreachable, redacted
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.hub import hub_resolve
from shared.hub.hub_client import Hub
from shared.model.families import architecture_of
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime import addresses
from shared.runtime.errors import ConfigError, MyxoError
from shared.schema.ledger import ValuesChanged
from shared.schema.service_messages import ServiceStatus
from shared.store.payload_store import Store, StoreUnreachable
from shared.view.alarms import Alarm, alarms, standing
from shared.view.flow_history import FlowHistory
from shared.view.flow_view import FlowReader
from shared.view.stall import NATS, Away, RunSituation, Stall, StallWatch, reported_wait, watched_stall

Result = TypeVar("Result")
ANSWER_SECONDS = 5.0  # deadline for an answer of a given NATS or Redis


@dataclass(frozen=True)
class GivenServers:
    """Servers named by the environment; None: not given, the launcher runs one of its own."""

    nats_url: str | None
    redis_url: str | None


def given_servers() -> GivenServers:
    """Returns what ``NATS_URL`` and ``REDIS_URL`` say, or the files of ``NATS_URL_FILE`` and ``REDIS_URL_FILE``. Raises ConfigError."""
    return GivenServers(addresses.nats_url() or None, addresses.redis_url() or None)


async def check_servers(given: GivenServers, run: str) -> None:
    """Refuses a given URL at which no server answers."""
    if given.nats_url is not None:
        await (await connect(given.nats_url, run)).close()
    if given.redis_url is not None:
        await check_store(given.redis_url)


async def connect(
    url: str, run: str, expected: str = "give nats://[user:password@]host:port of a server with JetStream, or unset it for an embedded one"
) -> Bus:
    """Connects to the NATS server that a person named, as the run's operator, or by another of its accounts that the URL has.

    Raises ConfigError for field NATS_URL, the value without credentials.
    """
    role, _, owner = (urlsplit(url).username or "").partition(".")
    try:
        return await Bus.connect(url, name="myxo", deadline=ANSWER_SECONDS, inbox=Subjects(run).inbox(role if owner == run else OPERATOR))
    except BusUnreachable as error:
        raise ConfigError("NATS_URL", redacted(url), f"{error}; {_of_other_run(role, owner, run) or expected}") from error


def _of_other_run(role: str, owner: str, run: str) -> str:
    """Returns whose account a URL has, and how to get that of ``run``; empty where it is that run's, or of no run."""
    if not owner or owner == run:
        return ""
    switch = f"`MYXO_RUN={run} docker compose up --detach` (elsewhere `myxo accounts DIR --run {run}`) brings up those of {run}"
    return f"the accounts that are up are of run {owner} ({role}.{owner}); {switch}, whose data are kept"


async def check_store(url: str) -> None:
    """Refuses a Redis URL without a server."""
    expected = "give redis://[user:password@]host:port or unix:///path/to/socket, or unset it for an embedded Valkey"
    try:
        async with contextlib.aclosing(Store(url)) as store:
            await store.ping(deadline=ANSWER_SECONDS)
    except (ValueError, StoreUnreachable, RedisError) as error:
        raise ConfigError("REDIS_URL", redacted(url), f"{error}; {expected}") from error


def on_bus(url: str, run: str, work: Callable[[Bus], Awaitable[Result]]) -> Result:
    """Returns what ``work`` does on the NATS server that a person named. Raises as `connect`, and BusLost."""

    async def connected() -> Result:
        with told_when_lost():
            async with contextlib.aclosing(await connect(url, run)) as bus:
                return await work(bus)

    return asyncio.run(connected())


async def make_run(bus: Bus, config: RunConfig, redis_url: str, asked: str = "") -> ValuesChanged | None:
    """Makes a run as `runs.create` does, by what lies on this machine. Raises ConfigError where the bus has lost it."""
    run = config.run.name
    if not await streams.exists(bus, run) and (lost := RunDirectory(config.run.root).without_streams(run, config)):
        raise ConfigError("run.name", run, lost)
    tokens, saved = await asyncio.to_thread(vocabulary, config), max(checkpoints(config), default=0)
    return await runs.create(bus, config, redis_url, tokens, saved, asked)


def pinned_config(config: RunConfig, hub: Hub, *, fresh: bool) -> RunConfig:
    """Returns the config with its names on the hub pinned as they were when the run of that name began, or, with ``fresh``, as they stand
    now. Raises ConfigError by field."""
    if not hub_resolve.found(config):
        return config
    known = None if fresh else hub_resolve.pins_in(config.run.root)
    if known is None and not fresh and (url := given_servers().nats_url) is not None:
        known = {}
        with contextlib.suppress(runs.NoSuchRun):
            known = hub_resolve.pins(on_bus(url, config.run.name, lambda bus: runs.load(bus, config.run.name)))
    return hub_resolve.pinned(config, known, hub=hub)


ALARM_SECONDS = 5.0  # interval at which ledger and events are read and alarms are judged while a run is at work
READ_SECONDS = 15.0  # time without progress after which reading a stream is given up
SETTLE_SECONDS = 5.0  # time that a run that is just starting or stopping has to publish its servers' addresses, or to release its directory


@dataclass(frozen=True)
class Access:
    """A run within reach. ``live``: whether its servers are up without this command. ``guest_url``: of its NATS server, for the console's
    account where this command serves it."""

    run: str
    config: RunConfig
    bus: Bus
    directory: RunDirectory
    live: bool
    guest_url: str


class BusLost(MyxoError):
    """The connection to the bus broke in the middle of a command."""


@contextlib.contextmanager
def told_when_lost() -> Iterator[None]:
    """Turns the client's errors into one with a message of one line."""
    try:
        yield
    except (nats.errors.Error, *TRANSIENT) as error:
        raise BusLost(f"the bus broke off in the middle ({type(error).__name__}: {error}); try again") from error


@contextlib.asynccontextmanager
async def reach(run: str, directory: Path) -> AsyncIterator[Access]:
    """Opens the named run for as long as the body runs.

    ``run``: its id or directory. ``directory``: where runs lie. Raises ConfigError where there is no such run, RunHeld where its servers
    are just coming or going.
    """
    with told_when_lost():
        async with contextlib.AsyncExitStack() as stack:
            yield await _reached(run, directory, stack)


async def refuse_work(access: Access) -> None:
    """Refuses a run whose services are at work. Raises ConfigError."""
    if access.live and (busy := await runs.at_work(access.bus, access.config)):
        raise ConfigError("RUN", access.run, f"a run that is at rest: {busy}")


async def _reached(run: str, directory: Path, stack: contextlib.AsyncExitStack) -> Access:
    name, files = find(run, directory)
    given = given_servers().nats_url
    if given is not None:
        bus = await stack.enter_async_context(contextlib.aclosing(await connect(given, name)))
        if not await streams.exists(bus, name):
            if files is not None and (lost := files.without_streams(name, None)):
                raise ConfigError("RUN", run, lost)
            raise ConfigError("RUN", run, f"no such run on the NATS server at {redacted(given)}; `myxo submit CONFIG` makes one")
        config = await _config(bus, name, files)
        return Access(name, config, bus, files or RunDirectory(config.run.root), live=True, guest_url=given)
    if files is None:
        raise no_such_run(run, directory)
    servers = await settled(files)
    if servers is not None:
        url = guest_url = servers.nats_url
    else:
        if not (files.nats / "jetstream").is_dir():
            lost = files.without_streams(name, None) or f"{files.root} holds no streams"
            if (files.root / "slurm").is_dir():  # of deploy/slurm/run.sbatch
                lost = f"its NATS runs with its SLURM job alone, which keeps its data ({files.root / 'slurm'}); submit the job again"
            raise ConfigError("RUN", run, f"{lost}; if the run is on a NATS server of its own, set NATS_URL")
        stack.enter_context(files.held(READING))
        url, guest_url = _served(EmbeddedNats(files.nats, rights_of(CONSOLE, name)), stack)
    bus = await stack.enter_async_context(contextlib.aclosing(await Bus.connect(url, name="myxo")))
    return Access(name, files.placed(await _config(bus, name, files)), bus, files, live=servers is not None, guest_url=guest_url)


async def _config(bus: Bus, run: str, files: RunDirectory | None) -> RunConfig:
    """Returns the run's config, by the copy in its directory where the bus's cannot be read. Raises NoSuchRun, UnreadableRun."""
    try:
        return await runs.load(bus, run)
    except runs.NoSuchRun as error:
        if files is not None and isinstance(error, runs.UnreadableRun):
            return runs.copy_instead(files.root, error)
        if files is not None and (lost := files.without_streams(run, None)):
            raise ConfigError("RUN", run, lost) from error
        raise


def _served(server: EmbeddedNats | EmbeddedValkey, stack: contextlib.AsyncExitStack) -> tuple[str, str]:
    stack.callback(server.stop)
    server.start()
    return server.url, server.guest_url


async def settled(files: RunDirectory) -> ServerUrls | None:
    """Returns the live run's servers; None once no launcher holds the directory, or when it takes too long to tell."""
    end = time.monotonic() + SETTLE_SECONDS
    while (servers := files.servers()) is None and files.is_held() and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return servers


# --- the store


@contextlib.asynccontextmanager
async def payloads(access: Access) -> AsyncIterator[Store]:
    """Opens the store of the run's payloads, for as long as the body runs. Raises as `payload_url` does."""
    async with payload_url(access) as url, contextlib.aclosing(Store(url, access.run)) as store:
        yield store


@contextlib.asynccontextmanager
async def payload_url(access: Access) -> AsyncIterator[str]:
    """Yields the URL of the store of the run's payloads, which answers as long as the body runs.

    It is that of ``REDIS_URL``, the live run's own, the one that its creator named, or that of what an embedded one left on disk, served
    for the moment. Raises ConfigError where none is known or the given one does not answer, RunHeld where its servers are just coming or
    going.
    """
    if (url := given_servers().redis_url) is not None:
        await check_store(url)
    else:
        url = await _own_store(access)
    async with contextlib.AsyncExitStack() as stack:
        if url is None:
            files = access.directory
            if not (files.valkey / "appendonlydir").is_dir():
                expected = "required in the environment: redis://[user:password@]host:port of the run's payloads, or REDIS_URL_FILE"
                raise ConfigError("REDIS_URL", None, expected)
            if access.live:  # a run at rest is held since it was reached
                stack.enter_context(files.held())
            url, _ = _served(EmbeddedValkey(files.valkey, access.config.store.appendfsync, access.config.store.max_bytes), stack)
        yield url


async def _own_store(access: Access) -> str | None:
    """Returns the live run's store, or the one that the run's creator named; None where both are gone."""
    servers = access.directory.servers() if access.live else None
    if servers is not None and servers.nats_url == access.bus.url:  # else a run of the same name on another bus, with the same keys
        return servers.redis_url
    return addresses.still_there(await runs.store_url(access.bus, access.run))


class RunWatch:
    """The alarms of a run whose files lie in ``directory``, and what it waits for, from one moment to the next. ``history``: what was read
    of it so far, another one with the new ``config`` where it was begun anew."""

    def __init__(self, bus: Bus, config: RunConfig, directory: Path) -> None:
        self._bus, self.config, self._directory, self.history = bus, config, directory, FlowHistory()
        self._reader: FlowReader | None = None
        self._waits, self._bus_since, self._life = StallWatch(), 0.0, ""

    async def situation(self, services: Sequence[ServiceStatus]) -> RunSituation:
        """Returns the situation of a live run, with the wait that its launcher tells of. Raises `BUS_ERRORS`."""
        self._bus_since = 0.0
        reported = reported_wait(await Registry(self._bus, self.config.run.name).launcher())
        return RunSituation.of(self.config, services, reported=reported, errors=self.history.failures.errors if reported is None else {})

    async def wait(self, services: Sequence[ServiceStatus], now: float) -> Stall:
        """Returns what a live run waits for, by the statuses of the services. Raises `BUS_ERRORS`."""
        return watched_stall(self._waits, await self.situation(services), now)

    def wait_without_bus(self, why: str, now: float) -> Stall:
        """Returns what it waits for while the bus is away."""
        self._bus_since = self._bus_since or now
        return watched_stall(self._waits, RunSituation.of(self.config, (), away={NATS: Away(self._bus_since, why)}), now)

    async def standing(self, statuses: Sequence[ServiceStatus], live: bool, away: str = "") -> list[Alarm]:
        """Returns the alarms that stand now, those of a run that is not ``live`` at its last record. Raises `BUS_ERRORS`. ``statuses``:
        what the registry holds; ``away``: why the bus is away, of which nothing is read then."""
        run = self.config.run.name
        if self._reader is None or not away:
            life = await streams.life(self._bus, ledger := Subjects(run).ledger_stream, READ_SECONDS)
            if self._reader is None or life != self._life:
                last = await streams.last_sequence(self._bus, ledger, READ_SECONDS)
                self.config = self.config if self._reader is None else await runs.load(self._bus, run)
                self._reader = FlowReader(run, functools.partial(streams.read, self._bus, deadline=READ_SECONDS), last)
                self.history, self._waits, self._life = self._reader.history, StallWatch(), life
            await self._reader.catch_up()
        self._reader.observe(statuses, time.time() if live else self.history.newest)
        return alarms(standing(self.history, statuses, {NATS: away} if away else {}, self._directory, live=live), self.config)


def vocabulary(config: RunConfig) -> int:
    """Returns the ``vocab_size`` of the model's config.json: ids that the engine may draw and the trainer may embed.

    A model on the hub is in this machine's cache once the config is checked. Raises ConfigError.
    """
    return architecture_of(hub_resolve.local(config, ("model.hf_checkpoint",), weights=False)).vocab_size
