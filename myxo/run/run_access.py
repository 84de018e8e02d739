"""Finding bus and store of a run to look at: given servers, the live run's own, or its stored files served for the moment."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import nats.errors

from myxo.preflight.server_checks import check_store, connect, given_servers
from myxo.run.run_directory import RunDirectory, ServerUrls, find, no_such_run
from shared.bus import runs, streams
from shared.bus.connection import TRANSIENT, Bus, redacted
from shared.config.run_config import RunConfig
from shared.runtime.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.errors import ConfigError, MyxoError
from shared.store.payload_store import Store

SETTLE_SECONDS = 5.0
"""How long a run that is just starting or just stopping has to say where its servers are, or to let go."""


@dataclass(frozen=True)
class Access:
    """A run within reach. ``live``: whether its servers are up without this command."""

    run: str
    config: RunConfig
    bus: Bus
    directory: RunDirectory
    live: bool


class BusLost(MyxoError):
    """The bus broke off in the middle of a command."""


@contextlib.contextmanager
def told_when_lost() -> Iterator[None]:
    """Turns the client's errors into one that says in a line what happened."""
    try:
        yield
    except (nats.errors.Error, *TRANSIENT) as error:
        raise BusLost(f"the bus broke off in the middle ({type(error).__name__}: {error}); try again") from error


@contextlib.asynccontextmanager
async def reach(run: str, directory: Path) -> AsyncIterator[Access]:
    """The run that a person named, for as long as the body runs.

    Args:
        run: its id or directory. directory: where runs lie.

    Raises ConfigError where there is no such run, RunHeld where its servers are just coming or going.
    """
    with told_when_lost():
        async with _reach(run, directory) as access:
            yield access


@contextlib.asynccontextmanager
async def _reach(run: str, directory: Path) -> AsyncIterator[Access]:
    name, files = find(run, directory)
    given = given_servers().nats_url
    if given is not None:
        bus = await connect(given, name)
        try:
            if not await streams.exists(bus, name):
                raise ConfigError("RUN", run, f"no such run on the NATS server at {redacted(given)}; `myxo submit CONFIG` makes one")
            config = await runs.load(bus, name)
            yield Access(name, config, bus, files or RunDirectory(config.run.root), live=True)
        finally:
            await bus.close()
        return
    if files is None:
        raise no_such_run(run, directory)
    servers = await _settled(files)
    if servers is not None:
        bus = await Bus.connect(servers.nats_url, name="myxo")
        try:
            yield Access(name, await runs.load(bus, name), bus, files, live=True)
        finally:
            await bus.close()
        return
    if not (files.nats / "jetstream").is_dir():
        raise ConfigError("RUN", run, f"{files.root} holds no streams; if the run is on a NATS server of its own, set NATS_URL")
    files.hold()
    try:
        server = EmbeddedNats(files.nats)
        server.start()
        try:
            bus = await Bus.connect(server.url, name="myxo")
            try:
                yield Access(name, await runs.load(bus, name), bus, files, live=False)
            finally:
                await bus.close()
        finally:
            server.stop()
    finally:
        files.release()


async def _settled(files: RunDirectory) -> ServerUrls | None:
    """The live run's servers; None once nobody holds the directory, or when it takes too long to tell."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        servers = files.servers()
        if servers is not None or not files.is_held() or time.monotonic() > end:
            return servers
        await asyncio.sleep(0.1)


# --- the store


@contextlib.asynccontextmanager
async def payloads(access: Access) -> AsyncIterator[Store]:
    """The store of the run's payloads, for as long as the body runs: that of ``REDIS_URL``, the live run's own, the one that its creator
    named, or what an embedded one left on disk, served for the moment.

    Raises ConfigError where none is known or the given one does not answer, RunHeld where its servers are just coming or going.
    """
    url = given_servers().redis_url
    if url is not None:
        await check_store(url)
    else:
        url = _own_store(access) or _reachable(await runs.store_url(access.bus, access.run))
    if url is not None:
        async with _opened(url) as store:
            yield store
        return
    files = access.directory
    if not (files.valkey / "appendonlydir").is_dir():
        expected = "required in the environment: redis://[user:password@]host:port of the run's payloads, or REDIS_URL_FILE"
        raise ConfigError("REDIS_URL", None, expected)
    with _held(files) if access.live else contextlib.nullcontext():  # a run at rest is held since it was reached
        server = EmbeddedValkey(files.valkey, access.config.store.appendfsync)
        try:
            server.start()
            async with _opened(server.url) as store:
                yield store
        finally:
            server.stop()


def _own_store(access: Access) -> str | None:
    """The live run's; not that of a run of the same name on another bus, whose keys would be the same."""
    servers = access.directory.servers() if access.live else None
    return servers.redis_url if servers is not None and servers.nats_url == access.bus.url else None


def _reachable(stated: str | None) -> str | None:
    """What the run's creator said, unless it is the socket of a server that is gone."""
    if not stated or (stated.startswith("unix:") and not Path(urlsplit(stated).path).is_socket()):
        return None
    return stated


@contextlib.asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Store]:
    store = Store(url)
    try:
        yield store
    finally:
        await store.close()


@contextlib.contextmanager
def _held(files: RunDirectory) -> Iterator[None]:
    files.hold()
    try:
        yield
    finally:
        files.release()
