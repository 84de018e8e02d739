"""What the console's Samples page costs on a long history: 100,000 groups in a real ledger, the console as a process, asked over HTTP.

``python -m benchmarks.console [--groups N] [--asked N] [--json FILE]`` writes a ledger of N groups of 8 samples into a NATS server of its
own, starts ``python -m services.console`` on it, waits until that has read all of it, and asks for lists in every order, by every filter,
at the beginning, in the middle and at the end, ``--asked`` times each in random order; then for groups and batches. Memory is the process's
own, at its highest.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console as Terminal
from rich.table import Table

from benchmarks.command_line import machine, parsed, write
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.config_reading import parse
from shared.process.child_process import with_parent
from shared.process.embedded_servers import EmbeddedNats, free_port
from shared.schema.ledger import (
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    GroupDead,
    GroupsAdmitted,
    GroupsScored,
    LedgerRecord,
    group_id,
)
from shared.schema.messages import Payload, SampleMeta, ScoredGroup

RUN, TOKEN = "history", "a-token-for-the-benchmark-0123456789"

BATCH, SAMPLES, DEAD_EVERY = 32, 8, 500

P95_GOAL_MS, MEMORY_GOAL_MB = 200.0, 300.0

READ_SECONDS = 900.0
"""The deadline for reading the history."""

ORDERS = ("changed", "admitted", "reward", "spread", "tokens", "longest", "truncated", "attempt", "seconds")

FILTERS = (
    "",
    "status=trained",
    "status=dead",
    "step=1000",
    "version=500",
    "min_reward=0.5&max_reward=0.7",
    "min_tokens=4000",
    "reason=verifier",
    "teaches=false",
    "truncated=true&teaches=true",
    "replica=rollout-3",
    "group=77",
)


def history(groups: int) -> Iterator[LedgerRecord]:
    """Yields the ledger of a run of so many groups."""
    chance = random.Random(0)
    for step in range(groups // BATCH):
        first, at = step * BATCH, 1e9 + 10.0 * step
        names = [group_id(first + place) for place in range(BATCH)]
        dead = [name for place, name in enumerate(names) if (first + place) % DEAD_EVERY == 0]
        yield GroupsAdmitted(first=first, count=BATCH, version=step // 2, at=at)
        back = [name for name in names if name not in dead]
        for begin in range(0, len(back), 4):  # groups come back a few at a time
            yield GroupsScored(groups=[_scored(chance, name, step // 2, at) for name in back[begin : begin + 4]], at=at + 5)
        for name in dead:
            yield GroupDead(group=name, reason="reward-0: the verifier hung", at=at + 6)
        yield BatchFormed(step=step, version=step // 2, groups=back, at=at + 6)
        yield BatchTrained(step=step, version=step // 2, started=at + 6, ended=at + 9, at=at + 9)
        if step % 100 == 99:
            yield CheckpointDurable(steps=step + 1, at=at + 10)


def _scored(chance: random.Random, name: str, version: int, at: float) -> ScoredGroup:
    metas = [
        SampleMeta(
            tokens=(length := chance.randrange(20, 1024)),
            trained=length,
            oldest=max(0, version - 1),
            newest=version,
            finish=chance.choice(("stop", "length")),
        )
        for _ in range(SAMPLES)
    ]
    return ScoredGroup(
        group=name,
        attempt=0,
        payload=Payload(keys=[f"{RUN}:group:{name}:0:0:0"], bytes=60_000, tokens=tuple(meta.tokens for meta in metas)),
        samples=metas,
        rewards=[float(chance.random() < 0.4) for _ in metas],
        replica=f"rollout-{chance.randrange(4)}",
        started=at,
        ended=at + 5 * chance.random(),
    )


async def fill(url: str, directory: Path, groups: int) -> int:
    """Puts the run and its ledger on the bus; returns how many records it has."""
    config = parse(
        {
            "run": {"name": RUN, "dir": str(directory)},
            "model": {"hf_checkpoint": str(directory / "model")},
            "data": {"prompt_data": str(directory / "prompts.jsonl")},
            "rollout": {"num_rollout": max(1, groups // BATCH), "rollout_batch_size": BATCH, "n_samples_per_prompt": SAMPLES},
        }
    )
    bus, names, records = await Bus.connect(url, "benchmark"), Subjects(RUN), 0
    await runs.create(bus, config, None)
    for record in history(groups):
        records += 1
        await bus.js.publish_async(names.ledger(record.event()), record.encode())
        if records % 256 == 0:
            await bus.js.publish_async_completed()
    await bus.js.publish_async_completed()
    await bus.close()
    return records


@contextlib.contextmanager
def console(url: str) -> Iterator[tuple[str, int]]:
    """Runs a console on the bus; yields its address and its process id."""
    port = free_port()
    given = {"NATS_URL": url, "MYXO_RUN": RUN, "MYXO_CONSOLE": f"127.0.0.1:{port}", "MYXO_CONSOLE_TOKEN": TOKEN}
    process = subprocess.Popen(
        with_parent([sys.executable, "-m", "services.console"]), env={**os.environ, **given}, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}/api/", process.pid
    finally:
        process.terminate()
        process.wait(30)


def asked(address: str) -> tuple[float, Any]:
    """Returns the milliseconds that an answer took, as a browser waits for it, and the answer."""
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {TOKEN}"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=30) as answer:
        body = answer.read()
    return 1000 * (time.perf_counter() - began), json.loads(body)


def wait_until_read(address: str, groups: int) -> tuple[float, list[float]]:
    """Waits until the console has the whole history; returns the seconds, and the milliseconds of lists that were asked for meanwhile."""
    began, meanwhile = time.monotonic(), list[float]()
    while time.monotonic() - began < READ_SECONDS:
        with contextlib.suppress(OSError, urllib.error.URLError):
            took, listed = asked(f"{address}samples")
            meanwhile.append(took)
            if listed["total"] == groups and listed["reading"]["read"] >= listed["reading"]["of"]:
                return time.monotonic() - began, meanwhile
        time.sleep(0.2)
    raise SystemExit(f"the console has not read the history within {READ_SECONDS:g} s")


def lists(groups: int) -> list[str]:
    """Returns the queries of lists."""
    offsets = (0, groups // 2, groups - 50)
    sorts = [f"sort={order}&descending={down}&offset={offset}" for order in ORDERS for down in ("true", "false") for offset in offsets]
    return sorts + [f"{chosen}&sort={order}" for chosen in FILTERS for order in ("changed", "reward", "longest")]


def timed(address: str, queries: list[str], times: int) -> dict[str, float]:
    """Returns quantiles of the milliseconds that queries took, each asked so often, in random order."""
    order = queries * times
    random.Random(1).shuffle(order)
    took = [asked(address + query)[0] for query in order]
    p50, p95, p99 = np.quantile(took, (0.5, 0.95, 0.99)).round(1).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": round(max(took), 1), "asked": len(took)}


def peak_mb(pid: int) -> float:
    """Returns the highest resident memory of a process, in MB (10^6 bytes)."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


def main() -> None:
    options = parsed(__doc__, groups=(100_000, "groups of history"), asked=(5, "times that each list is asked for"))
    groups = options.groups // BATCH * BATCH
    with tempfile.TemporaryDirectory() as directory:
        nats = EmbeddedNats(Path(directory) / "nats")
        nats.start()
        try:
            records = asyncio.run(fill(nats.url, Path(directory), groups))
            with console(nats.url) as (address, pid):
                read_s, meanwhile = wait_until_read(address, groups)
                figures: dict[str, Any] = {"groups": groups, "samples": groups * SAMPLES, "records": records, "read_s": round(read_s, 1)}
                figures["list_while_reading_p95_ms"] = round(float(np.quantile(meanwhile, 0.95)), 1)
                figures["list_ms"] = timed(address, [f"samples?{query}" for query in lists(groups)], options.asked)
                chance = random.Random(2)
                some = [f"samples/groups/{group_id(chance.randrange(groups))}" for _ in range(100)]
                figures["group_ms"] = timed(address, some, 1)
                figures["facets_ms"] = timed(address, ["samples/facets"], 20)
                figures["memory_mb"] = peak_mb(pid)
        finally:
            nats.stop()
    write(options.json, figures)
    show(figures)


def show(figures: dict[str, Any]) -> None:
    """Prints the figures with their goals."""
    table = Table(title=f"The Samples page on {figures['groups']:,} groups, {machine()}", box=None, padding=(0, 2, 0, 0))
    for name in ("figure", "measured", "goal"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    table.add_row("history read", f"{figures['read_s']:g} s", "")
    table.add_row("a list meanwhile, p95", f"{figures['list_while_reading_p95_ms']:g} ms", "")
    for name, words in (("list_ms", "a list"), ("group_ms", "a group"), ("facets_ms", "what can be filtered by")):
        table.add_row(f"{words}, p95", f"{figures[name]['p95']:g} ms", f"{P95_GOAL_MS:g} ms" if name == "list_ms" else "")
    table.add_row("memory of the console, at its highest", f"{figures['memory_mb']:g} MB", f"{MEMORY_GOAL_MB:g} MB")
    Terminal().print(table)


if __name__ == "__main__":
    main()
