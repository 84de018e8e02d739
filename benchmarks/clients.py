"""Our own clients of Redis and NATS beside the libraries', on the same servers in the same minutes.

``python -m benchmarks.clients [--json FILE] [--seconds S] [--repetitions N]`` starts NATS and Valkey as ``myxo up`` does and measures

- ``write``, ``read``: blobs of a group by `shared.store.payload_store.Store`, beside MSET and MGET of redis-py's asyncio client with
  hiredis, eight calls at a time; ``read in threads``: beside MGET of its blocking client;
- ``stream``: the same blobs by `BlockingStore`, beside MGETs of as many bytes as ours has on their way;
- ``publish``: messages of a kilobyte into a stream by `Bus.publish_all`, 64 at a time, beside nats-py's ``publish_async``.

Blobs are those of groups of 8 samples of 768 and of 8,448 tokens. The sides take turns, one of each in every repetition, and begin in turn.
``ratio`` is the library's figure over ours, of pace (units per second) and of the client's own CPU seconds per unit: the median over
repetitions. The library would replace our code where it is within 10 % of both.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from rich.console import Console
from rich.table import Table

from shared.bus.connection import Bus
from shared.runtime.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.digests import reference
from shared.schema.messages import Message
from shared.schema.service_messages import ServiceEvent
from shared.store.payload_store import BlockingStore, Store

BLOB_BYTES = {"45 kB": 45_000, "600 kB": 600_000}
RUN = "benchmark"
CALLS = 8
"""Calls on their way at a time."""

CALL_BYTES = 2 << 20
"""Of one call, about."""

PIPELINE_BYTES = 4 << 20
READ_BYTES = 1 << 20
"""What the libraries read at once; at their default of 64 kB they are a third slower."""

PUBLISHES = 64
MESSAGE_TEXT = "x" * 900

Work = Callable[[], Awaitable[int]]
"""Does some work and returns how many units it was."""


@dataclass(frozen=True)
class Comparison:
    """One row: the same work by our code and by the library."""

    name: str
    unit: str
    ours: Work
    library: Work


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--seconds", type=float, default=1.5, metavar="S", help="of a measurement, at least (default 1.5)")
    parser.add_argument("--repetitions", type=int, default=9, metavar="N", help="of each pair (default 9)")
    given = parser.parse_args()
    figures = asyncio.run(measure(given.seconds, given.repetitions))
    Console().print(table(figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


async def measure(seconds: float, repetitions: int) -> dict[str, Any]:
    """Returns all figures."""
    with tempfile.TemporaryDirectory() as directory:
        nats_server, valkey = EmbeddedNats(Path(directory) / "nats"), EmbeddedValkey(Path(directory) / "valkey")
        try:
            nats_server.start()
            valkey.start()
            rows = []
            for comparison in [*await store_comparisons(valkey.url), await publish_comparison(nats_server.url)]:
                rows.append(await compared(comparison, seconds, repetitions))
                print(json.dumps(rows[-1]), file=sys.stderr)
        finally:
            valkey.stop()
            nats_server.stop()
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores, not reserved: load {os.getloadavg()[0]:.1f} at the end",
        "packages": {name: importlib.metadata.version(name) for name in ("redis", "hiredis", "nats-py")},
        "seconds": seconds,
        "repetitions": repetitions,
        "rows": rows,
    }


async def compared(comparison: Comparison, seconds: float, repetitions: int) -> dict[str, Any]:
    """Returns the row of one comparison, its repetitions interleaved."""
    sides = {"ours": comparison.ours, "library": comparison.library}
    for work in sides.values():
        await timed(work, seconds / 3)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        for name in list(sides) if repetition % 2 else reversed(sides):
            measured[name].append(await timed(sides[name], seconds))
    pairs = list(zip(measured["ours"], measured["library"], strict=True))
    return {
        "name": comparison.name,
        "unit": comparison.unit,
        **{f"{name}_per_s": round(statistics.median(pace for pace, _ in figures), 1) for name, figures in measured.items()},
        **{f"{name}_cpu_ms": round(statistics.median(cost for _, cost in figures) * 1000, 4) for name, figures in measured.items()},
        "pace_ratio": round(statistics.median(library[0] / ours[0] for ours, library in pairs), 3),
        "cpu_ratio": round(statistics.median(library[1] / ours[1] for ours, library in pairs), 3),
    }


async def timed(work: Work, seconds: float) -> tuple[float, float]:
    """Returns units per second, and CPU seconds of this process per unit."""
    begun, cpu, units = time.monotonic(), time.process_time(), 0
    while time.monotonic() - begun < seconds:
        units += await work()
    return units / (time.monotonic() - begun), (time.process_time() - cpu) / units


async def store_comparisons(url: str) -> list[Comparison]:
    """Returns write, read and stream for each size of blob."""
    options = {"protocol": 2, "socket_read_size": READ_BYTES}
    store, client, blocking = Store(url, RUN), redis.asyncio.Redis.from_url(url, **options), redis.Redis.from_url(url, **options)
    return [
        comparison
        for label, size in BLOB_BYTES.items()
        for comparison in await blob_comparisons(label, os.urandom(size), store, client, BlockingStore(url, RUN), blocking)
    ]


async def blob_comparisons(
    label: str, blob: bytes, store: Store, client: redis.asyncio.Redis, reader: BlockingStore, blocking: redis.Redis
) -> list[Comparison]:
    batch = max(1, CALL_BYTES // len(blob))
    window = max(1, PIPELINE_BYTES // len(blob))
    calls = [[f"{label}:{call}:{index}" for index in range(batch)] for call in range(CALLS)]
    keys = [key for call in calls for key in call]
    await store.write(dict.fromkeys(keys, blob))
    payloads = {call[0]: reference(RUN, dict.fromkeys(call, blob)) for call in calls}

    async def write_ours(call: list[str]) -> None:  # what is there is not written again
        await store.free(call)
        await store.write(dict.fromkeys(call, blob))

    async def write(call: list[str]) -> None:
        await client.unlink(*call)
        await client.mset(dict.fromkeys(call, blob))

    async def read_ours(call: list[str]) -> None:
        assert all(len(back) == len(blob) for back in await store.read(payloads[call[0]]))

    async def read(call: list[str]) -> None:
        assert all(len(back) == len(blob) for back in await client.mget(call))

    async def read_in_thread(call: list[str]) -> None:
        assert all(len(back) == len(blob) for back in await asyncio.to_thread(blocking.mget, call))

    async def stream_ours() -> int:
        return sum(len(back) == len(blob) for blobs in reader.stream(list(payloads.values())) for back in blobs)

    async def stream() -> int:
        windows = (keys[start : start + window] for start in range(0, len(keys), window))
        return sum(len(back) == len(blob) for some in windows for back in blocking.mget(some))

    def together(one_call: Callable[[list[str]], Awaitable[None]]) -> Work:
        async def work() -> int:
            await asyncio.gather(*map(one_call, calls))
            return len(keys)

        return work

    return [
        Comparison(f"write {label}", "blobs", together(write_ours), together(write)),
        Comparison(f"read {label}", "blobs", together(read_ours), together(read)),
        Comparison(f"read {label} in threads", "blobs", together(read_ours), together(read_in_thread)),
        Comparison(f"stream {label}", "blobs", stream_ours, stream),
    ]


async def publish_comparison(url: str) -> Comparison:
    """Returns the row of publishing into a stream, each message with an id as in a run."""
    bus = await Bus.connect(url, "ours")
    library = await Bus.connect(url, "library")
    js: JetStreamContext = library.js
    await bus.js.add_stream(StreamConfig(name="clients", subjects=["clients.*"], max_msgs=10_000, duplicate_window=10))
    event: Message = ServiceEvent(service="s", instance="i", what="w", detail=MESSAGE_TEXT, at=time.time())
    sent = 0

    async def ours() -> int:
        nonlocal sent
        sent += PUBLISHES
        await bus.publish_all("clients.ours", {f"ours-{sent}-{index}": event for index in range(PUBLISHES)})
        return PUBLISHES

    async def theirs() -> int:
        nonlocal sent
        sent += PUBLISHES
        acks = [
            await js.publish_async("clients.library", event.encode(), headers={"Nats-Msg-Id": f"library-{sent}-{index}"})
            for index in range(PUBLISHES)
        ]
        await asyncio.wait(acks)
        assert all(ack.result().seq for ack in acks)
        return PUBLISHES

    return Comparison("publish 1 kB", "messages", ours, theirs)


def table(figures: dict[str, Any]) -> Table:
    """Returns the figures for people."""
    shown = Table(title="Our clients beside the libraries'")
    for column in ("", "ours/s", "library/s", "ours CPU ms", "library CPU ms", "pace, library : ours", "CPU, library : ours"):
        shown.add_column(column, justify="right" if column else "left")
    for row in figures["rows"]:
        shown.add_row(
            row["name"],
            f"{row['ours_per_s']:,.0f}",
            f"{row['library_per_s']:,.0f}",
            f"{row['ours_cpu_ms']:.3f}",
            f"{row['library_cpu_ms']:.3f}",
            f"{row['pace_ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
        )
    shown.caption = f"{figures['machine']}; medians over {figures['repetitions']} interleaved repetitions"
    return shown


if __name__ == "__main__":
    sys.exit(main())
