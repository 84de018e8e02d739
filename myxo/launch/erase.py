"""Removes a run from a bus and a store that outlive it, for `--fresh`."""

import time

import redis.asyncio
from nats.js.errors import NotFoundError

from shared.bus.connection import TRANSIENT, Bus
from shared.bus.subjects import Subjects
from shared.store.payload_store import options

SCAN = 1000
"""The number of keys that one SCAN asks for."""


async def erase_from_bus(bus: Bus, run: str) -> None:
    """Deletes the run's streams and buckets; absent ones are fine. The ledger goes last, since the run exists as long as its ledger.

    Raises NotPermitted.
    """
    names, start = Subjects(run), time.monotonic()
    buckets = (names.services_bucket, names.leases_bucket, names.secrets_bucket, names.weights_bucket, names.config_bucket)
    streams = (names.task_stream, names.generated_stream, names.scored_stream, names.events_stream)
    for stream in (*streams, *(f"KV_{bucket}" for bucket in buckets), names.ledger_stream):
        try:
            await bus.js.delete_stream(stream)
        except NotFoundError:
            continue
        except TRANSIENT:
            bus.raise_if_refused(start, "$JS.API.STREAM.DELETE.")
            raise


async def erase_from_store(url: str, run: str) -> None:
    """Deletes the run's payloads, and the data that its trainers exchanged."""
    client = redis.asyncio.Redis.from_url(url, **options(url))
    try:
        for kind in ("group", "exchange"):
            async for key in client.scan_iter(match=f"{run}:{kind}:*", count=SCAN):
                await client.unlink(key)
    finally:
        await client.aclose()
