"""How long a run is without a buffer: from the death of the active one to the next answered batch request.

``python -m benchmarks.standby [--json FILE] [--deaths N] [--records N]`` starts NATS, Valkey and two buffers, and for every death a new
one on standby. Ways to die:

- ``kill``: kill -9 on the machine of the one on standby, which sees that the process is dead.
- ``silence``: the process is stopped, as a machine looks that is gone: the lease runs out.
- ``stop``: SIGTERM: the lease is released.

The ledger holds ``--records`` records when it begins. ``replay`` is how long a buffer takes that has followed none of them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.buffer.ledger_writer import LedgerWriter
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import STANDBY, Registry
from shared.bus.streams import last_sequence
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.ledger import BatchFormed, BatchTrained, CheckpointDurable, GroupsAdmitted, GroupsScored, LedgerRecord, VersionLive
from shared.schema.ledger import group_id as group_id_of
from shared.schema.messages import Payload, SampleMeta, ScoredGroup
from tests.integration.buffer.player import Player
from tests.support.run_config import run_config, write_jsonl
from tests.support.service_process import ServiceProcess
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import until

WAYS = {"kill": signal.SIGKILL, "silence": signal.SIGSTOP, "stop": signal.SIGTERM}
GROUPS, SAMPLES = 2, 2
IN_FLIGHT = 256
"""Records on their way into the ledger at once."""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--deaths", type=int, default=5, help="of each way")
    parser.add_argument("--records", type=int, default=100_000, help="in the ledger when it begins")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.deaths, arguments.records))
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0


async def measure(deaths: int, records: int) -> dict[str, Any]:
    """Seconds of each way to die, and of the replay."""
    with tempfile.TemporaryDirectory() as room:
        directory = Path(room)
        write_tiny_model(directory / "model")
        write_jsonl(directory / "prompts.jsonl")
        nats, valkey = EmbeddedNats(directory / "nats"), EmbeddedValkey(directory / "valkey")
        nats.start()
        valkey.start()
        try:
            sizes = {"num_rollout": records, "rollout_batch_size": GROUPS, "n_samples_per_prompt": SAMPLES}
            config = run_config(directory, rollout=sizes, reward={"rm_type": "exact"})
            bus = await Bus.connect(nats.url, "benchmark")
            await runs.create(bus, config, valkey.url)
            say(f"writing {records} records")
            steps = await write(bus, config, records)
            replay = await replayed(bus, config)
            say(f"replayed in {replay:.1f} s")
            seconds = await die(Player(bus, None, config, nats.url, directory), steps, deaths)
            await bus.close()
        finally:
            valkey.stop()
            nats.stop()
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores shared with other jobs",
        "records": records,
        "replay_seconds": round(replay, 2),
        "to_the_next_answer": {way: summary(values) for way, values in seconds.items()},
    }


def summary(values: list[float]) -> dict[str, Any]:
    """Seconds."""
    return {"median": round(statistics.median(values), 2), "max": round(max(values), 2), "deaths": len(values)}


# --- a ledger of a long run


def ledger(records: int) -> Iterator[LedgerRecord]:
    """A synchronous run's records: a version live, groups admitted, scored, batched, trained, saved. The last batch is not trained yet."""
    yield VersionLive(version=0, at=time.time())
    yield GroupsAdmitted(first=0, count=GROUPS, version=0, at=time.time())
    last = (records - 2) // (GROUPS + 5)
    for step in range(last + 1):
        names = [group_id_of(step * GROUPS + number) for number in range(GROUPS)]
        now = time.time()
        samples, rewards = [SampleMeta(tokens=16, trained=16, oldest=step, newest=step, finish="stop")] * SAMPLES, [0.0] * SAMPLES
        for name in names:
            payload = Payload(keys=[f"test:group:{name}:0:0"], bytes=1000)
            scored = ScoredGroup(
                group=name, attempt=0, payload=payload, samples=samples, rewards=rewards, replica="r", started=now, ended=now
            )
            yield GroupsScored(groups=[scored], at=now)
        yield BatchFormed(step=step, version=step, groups=names, at=now)
        if step == last:
            return
        yield BatchTrained(step=step, version=step + 1, started=now, ended=now, at=now)
        yield CheckpointDurable(steps=step + 1, at=now)
        yield VersionLive(version=step + 1, at=now)
        yield GroupsAdmitted(first=(step + 1) * GROUPS, count=GROUPS, version=step + 1, at=now)


async def write(bus: Bus, config: RunConfig, records: int) -> int:
    """Writes the ledger; returns the steps that it holds."""
    names, steps, waiting = Subjects(config.run.name), 0, []
    for record in ledger(records):
        steps += isinstance(record, BatchTrained)
        waiting.append(await bus.js.publish_async(names.ledger(record.event()), record.encode()))
        if len(waiting) >= IN_FLIGHT:
            await asyncio.gather(*waiting)
            waiting = []
    await asyncio.gather(*waiting)
    return steps


async def replayed(bus: Bus, config: RunConfig) -> float:
    """Seconds that a buffer takes to read the whole ledger."""

    async def allowed() -> None:
        raise AssertionError("nothing is written here")

    start = time.monotonic()
    await LedgerWriter(bus, config.run.name, allowed, lambda state, record: None).follow()
    return time.monotonic() - start


# --- deaths


async def die(player: Player, steps: int, deaths: int) -> dict[str, list[float]]:
    """Lets the active buffer die again and again, with another on standby each time."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        active = stack.enter_context(player.launch("buffer-0"))
        await player.ready(active, "buffer-0")
        for number, way in enumerate([way for way in WAYS for _ in range(deaths)], start=1):
            heir = stack.enter_context(player.launch(f"buffer-{number}"))
            await followed(player, heir, f"buffer-{number}")
            await player.ask(steps)
            seconds[way].append(await one_death(player, steps, active, WAYS[way]))
            say(f"{way}: {seconds[way][-1]:.2f} s")
            active.__exit__()
            active = heir
            await player.ready(active, f"buffer-{number}")
    return seconds


async def followed(player: Player, heir: ServiceProcess, instance: str) -> None:
    """Waits until the one on standby has read the ledger."""
    await player.says(heir, instance, STANDBY)
    newest = await last_sequence(player.bus, player.names.ledger_stream)
    registry = Registry(player.bus, player.config.run.name)

    async def caught_up() -> bool:
        cards = [card for card in await registry.alive("buffer") if card.instance == instance]
        return any(card.gauges.get("followed", 0) >= newest for card in cards)

    await until(caught_up, f"{instance} at the end of the ledger")


async def one_death(player: Player, step: int, active: ServiceProcess, number: signal.Signals) -> float:
    os.kill(active.process.pid, number)
    start = time.monotonic()
    await player.ask(step)
    if number is not signal.SIGTERM:
        return time.monotonic() - start
    # one that is to stop may still answer: what counts is the first answer after its end
    await until(lambda: active.process.poll() is not None, "the end of the one that was asked to stop", pause=0.01)
    await player.ask(step)
    return time.monotonic() - start


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
