"""Finding the bus of a run to look at: a given NATS server, the live run's own, or its stored streams served for the moment."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import nats.errors

from shared import runs, streams
from shared.bus import TRANSIENT, Bus, redacted
from shared.cli import preflight
from shared.cli.rundir import RunDirectory, Servers, find, no_such_run
from shared.config import RunConfig
from shared.embedded import EmbeddedNats
from shared.errors import ConfigError, MyxoError

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
    given = preflight.given_servers().nats_url
    if given is not None:
        bus = await preflight.connect(given, name)
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


async def _settled(files: RunDirectory) -> Servers | None:
    """The live run's servers; None once nobody holds the directory, or when it takes too long to tell."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        servers = files.servers()
        if servers is not None or not files.is_held() or time.monotonic() > end:
            return servers
        await asyncio.sleep(0.1)
