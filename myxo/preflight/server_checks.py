"""The NATS and Redis servers that the environment names: whether they answer."""

from __future__ import annotations

from dataclasses import dataclass

from redis.exceptions import RedisError

from shared.bus.connection import Bus, BusUnreachable, redacted
from shared.bus.subjects import Subjects
from shared.runtime import server_urls
from shared.runtime.errors import ConfigError
from shared.store.payload_store import Store, StoreUnreachable

ANSWER_SECONDS = 5.0
"""How long a given NATS or Redis has to answer."""


@dataclass(frozen=True)
class GivenServers:
    """Servers named by the environment; None: not given, the launcher runs one of its own."""

    nats_url: str | None
    redis_url: str | None


def given_servers() -> GivenServers:
    """What ``NATS_URL`` and ``REDIS_URL`` say, or the files of ``NATS_URL_FILE`` and ``REDIS_URL_FILE``. Raises ConfigError."""
    return GivenServers(server_urls.nats_url() or None, server_urls.redis_url() or None)


async def check_servers(given: GivenServers, run: str) -> None:
    """Refuses a given URL that nobody answers."""
    if given.nats_url is not None:
        bus = await connect(given.nats_url, run)
        await bus.close()
    if given.redis_url is not None:
        await check_store(given.redis_url)


async def connect(url: str, run: str) -> Bus:
    """Connects to the NATS server that a person named, as the run's operator.

    Raises ConfigError for field NATS_URL, the value without credentials.
    """
    try:
        return await Bus.connect(url, name="myxo", deadline=ANSWER_SECONDS, inbox=Subjects(run).inbox("operator"))
    except BusUnreachable as error:
        expected = "give nats://[user:password@]host:port of a server with JetStream, or unset it for an embedded one"
        raise ConfigError("NATS_URL", redacted(url), f"{error}; {expected}") from error


async def check_store(url: str) -> None:
    """Refuses a Redis URL that nobody answers."""
    expected = "give redis://[user:password@]host:port or unix:///path/to/socket, or unset it for an embedded Valkey"
    try:
        store = Store(url)
    except ValueError as error:
        raise ConfigError("REDIS_URL", redacted(url), f"{error}; {expected}") from error
    try:
        await store.ping(deadline=ANSWER_SECONDS)
    except (StoreUnreachable, RedisError) as error:
        raise ConfigError("REDIS_URL", redacted(url), f"{error}; {expected}") from error
    finally:
        await store.close()
