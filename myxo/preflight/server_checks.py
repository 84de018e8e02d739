"""Checks that the NATS and Redis servers of the environment answer, and reads from the bus to which files a run's hub names are pinned."""

import asyncio
from dataclasses import dataclass

from redis.exceptions import RedisError

from shared.bus import runs
from shared.bus.connection import Bus, BusUnreachable, redacted
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.hub import hub_resolve
from shared.hub.hub_client import Hub
from shared.runtime import addresses
from shared.runtime.errors import ConfigError
from shared.store.payload_store import Store, StoreUnreachable

ANSWER_SECONDS = 5.0
"""The deadline for an answer of a given NATS or Redis."""


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
        bus = await connect(given.nats_url, run)
        await bus.close()
    if given.redis_url is not None:
        await check_store(given.redis_url)


async def connect(
    url: str, run: str, expected: str = "give nats://[user:password@]host:port of a server with JetStream, or unset it for an embedded one"
) -> Bus:
    """Connects to the NATS server that a person named, as the run's operator.

    Raises ConfigError for field NATS_URL, the value without credentials.
    """
    try:
        return await Bus.connect(url, name="myxo", deadline=ANSWER_SECONDS, inbox=Subjects(run).inbox("operator"))
    except BusUnreachable as error:
        raise ConfigError("NATS_URL", redacted(url), f"{error}; {expected}") from error


async def check_store(url: str) -> None:
    """Refuses a Redis URL that nobody answers."""
    expected = "give redis://[user:password@]host:port or unix:///path/to/socket, or unset it for an embedded Valkey"
    try:
        store = Store(url)
        try:
            await store.ping(deadline=ANSWER_SECONDS)
        finally:
            await store.close()
    except (ValueError, StoreUnreachable, RedisError) as error:
        raise ConfigError("REDIS_URL", redacted(url), f"{error}; {expected}") from error


def pinned(config: RunConfig, hub: Hub, *, fresh: bool) -> RunConfig:
    """Returns the config with its names on the hub pinned as they were when the run of that name began, or, with ``fresh``, as they stand
    now. Raises ConfigError by field."""
    if not hub_resolve.found(config):
        return config
    known = None if fresh else hub_resolve.pins_in(config.run.root)
    url = given_servers().nats_url
    if known is None and not fresh and url is not None:
        known = asyncio.run(_pins_on_bus(url, config.run.name))
    return hub_resolve.pinned(config, known, hub=hub)


async def _pins_on_bus(url: str, run: str) -> dict[str, str]:
    bus = await connect(url, run)
    try:
        return hub_resolve.pins(await runs.load(bus, run))
    except runs.NoSuchRun:
        return {}
    finally:
        await bus.close()
