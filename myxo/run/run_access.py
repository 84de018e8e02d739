"""Finds bus and store of a run to inspect: given servers, the live run's own, or its stored files served for the moment."""

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
from shared.accounts.permissions import CONSOLE, rights_of
from shared.bus import runs, streams
from shared.bus.connection import TRANSIENT, Bus, redacted
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.safe_text import say
from shared.store.payload_store import Store

SETTLE_SECONDS = 5.0
"""The time that a run that is just starting or stopping has to publish its servers' addresses, or to release its directory."""


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

    Args:
        run: its id or directory. directory: where runs lie.

    Raises ConfigError where there is no such run, RunHeld where its servers are just coming or going.
    """
    with told_when_lost():
        async with contextlib.AsyncExitStack() as stack:
            yield await _reached(run, directory, stack)


async def _reached(run: str, directory: Path, stack: contextlib.AsyncExitStack) -> Access:
    name, files = find(run, directory)
    given = given_servers().nats_url
    if given is not None:
        bus = await connect(given, name)
        stack.push_async_callback(bus.close)
        if not await streams.exists(bus, name):
            if files is not None and (lost := files.without_streams(name, None)):
                raise ConfigError("RUN", run, lost)
            raise ConfigError("RUN", run, f"no such run on the NATS server at {redacted(given)}; `myxo submit CONFIG` makes one")
        config = await _config(bus, name, files)
        return Access(name, config, bus, files or RunDirectory(config.run.root), live=True, guest_url=given)
    if files is None:
        raise no_such_run(run, directory)
    servers = await _settled(files)
    if servers is not None:
        url = guest_url = servers.nats_url
    else:
        if not (files.nats / "jetstream").is_dir():
            elsewhere = "if the run is on a NATS server of its own, set NATS_URL"
            raise ConfigError("RUN", run, f"{files.without_streams(name, None) or f'{files.root} holds no streams'}; {elsewhere}")
        stack.enter_context(files.held())
        url, guest_url = _served(EmbeddedNats(files.nats, rights_of(CONSOLE, name)), stack)
    bus = await Bus.connect(url, name="myxo")
    stack.push_async_callback(bus.close)
    return Access(name, await _config(bus, name, files), bus, files, live=servers is not None, guest_url=guest_url)


async def _config(bus: Bus, run: str, files: RunDirectory | None) -> RunConfig:
    """Returns the run's config, by the copy in its directory where the bus's cannot be read. Raises NoSuchRun, UnreadableRun."""
    copy = None if files is None else runs.frozen(files.root)
    if files is not None and copy is not None and copy.run.name == run and copy.run.root.resolve() != files.root.resolve():
        say(f"{files.root} is a copy of {copy.run.root}, which its config names; `myxo move` takes a run to another directory")
    try:
        return await runs.load(bus, run)
    except runs.NoSuchRun as error:
        if files is not None and isinstance(error, runs.UnreadableRun):
            return runs.copy_instead(files.root, error)
        if files is not None and (lost := files.without_streams(run, None)):
            raise ConfigError("RUN", run, lost) from error
        raise


def _served(server: EmbeddedNats | EmbeddedValkey, stack: contextlib.AsyncExitStack) -> tuple[str, str]:
    """Runs an embedded server until the stack is left; returns its URL, and that of its guest."""
    stack.callback(server.stop)
    server.start()
    return server.url, server.guest_url


async def _settled(files: RunDirectory) -> ServerUrls | None:
    """Returns the live run's servers; None once nobody holds the directory, or when it takes too long to tell."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        servers = files.servers()
        if servers is not None or not files.is_held() or time.monotonic() > end:
            return servers
        await asyncio.sleep(0.1)


# --- the store


@contextlib.asynccontextmanager
async def payloads(access: Access) -> AsyncIterator[Store]:
    """Opens the store of the run's payloads, for as long as the body runs. Raises as `payload_url` does."""
    async with payload_url(access) as url:
        store = Store(url, access.run)
        try:
            yield store
        finally:
            await store.close()


@contextlib.asynccontextmanager
async def payload_url(access: Access) -> AsyncIterator[str]:
    """Yields the URL of the store of the run's payloads, which answers as long as the body runs.

    It is that of ``REDIS_URL``, the live run's own, the one that its creator named, or that of what an embedded one left on disk, served
    for the moment.

    Raises ConfigError where none is known or the given one does not answer, RunHeld where its servers are just coming or going.
    """
    url = given_servers().redis_url
    if url is not None:
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
            store = access.config.store
            url, _ = _served(EmbeddedValkey(files.valkey, store.appendfsync, store.max_bytes), stack)
        yield url


async def _own_store(access: Access) -> str | None:
    """Returns the live run's store, or the one that the run's creator named; None where both are gone."""
    servers = access.directory.servers() if access.live else None
    if servers is not None and servers.nats_url == access.bus.url:  # else a run of the same name on another bus, with the same keys
        return servers.redis_url
    stated = await runs.store_url(access.bus, access.run)
    gone = stated is not None and stated.startswith("unix:") and not Path(urlsplit(stated).path).is_socket()
    return None if gone else stated
