"""Calls of verifiers in processes that can be killed: `services.reward.scorer` beside the library Pebble.

``python -m benchmarks.worker_pool [--calls N] [--workers N] [--rounds N] [--json FILE]`` scores groups of eight responses through both,
first with a verifier that costs next to nothing, then with math-verify. Then it has calls hang, and measures how long after their deadline
the caller has its error, and how long after that a replaced process has scored the next group. `concurrent.futures` cannot kill a call.

Pebble is no dependency of Myxo: ``pip install pebble`` before.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.reward.scorer import Verification, VerifierPool
from shared.rewards import verifiers
from shared.rewards.reference import Reference
from shared.runtime.errors import DeadlineExceeded

CALLS, WORKERS, IN_HAND = 4000, 2, 4
ROUNDS = 3
"""How often both are measured, in turns; the figures are medians."""

HANGS = 5
DEADLINE_S = 0.5
WARM_CALLS = 20

QUICK = (["42", "41", " 42 ", "7"] * 2, "42")
PARSED = ([rf"so it is \boxed{{\frac{{{n}}}{{4}}}}" for n in range(1, 9)], "1/2")
ENDLESS = ([r"\boxed{9^{9^{9^{9}}}}"], "1")
"""Responses and label of one call. The last one keeps sympy busy for longer than anybody waits."""

Score = Callable[[tuple[list[str], str], float], Awaitable[list[float]]]


def verify(name: str, responses: list[str], label: str) -> list[float]:
    """What a worker of Pebble's runs."""
    return [float(verifiers.verify(name, response, Reference(label))) for response in responses]


@asynccontextmanager
async def ours(name: str, workers: int) -> Any:
    """Yields how a group is scored by Myxo's own pool."""
    pool = VerifierPool(name, [name], workers)
    await pool.start()

    async def score(call: tuple[list[str], str], deadline_s: float) -> list[float]:
        return [score.reward for score in await pool.score(Verification(name, call[0], [Reference(call[1])]), deadline_s)]

    yield score
    await pool.close()


@asynccontextmanager
async def pebble(name: str, workers: int) -> Any:
    """Yields how a group is scored by Pebble's pool of spawned processes."""
    from pebble import ProcessPool

    pool = ProcessPool(max_workers=workers, context=multiprocessing.get_context("spawn"), initializer=verify, initargs=(name, [""], "x"))

    async def score(call: tuple[list[str], str], deadline_s: float) -> list[float]:
        return await asyncio.wrap_future(pool.schedule(verify, args=(name, *call), timeout=deadline_s))

    yield score
    pool.stop()
    await asyncio.to_thread(pool.join)


POOLS = {"ours": ours, "pebble": pebble}


async def calls_per_second(score: Score, call: tuple[list[str], str], calls: int, at_once: int) -> float:
    """Returns the rate at which groups are scored, ``at_once`` of them in hand."""
    await asyncio.gather(*(score(call, 60.0) for _ in range(WARM_CALLS)))
    left = iter(range(calls))

    async def ask() -> None:
        for _ in left:
            await score(call, 60.0)

    begin = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(at_once)))
    return calls / (time.perf_counter() - begin)


async def kill_latency(score: Score) -> tuple[float, float]:
    """Returns the medians of the seconds from a deadline to its error, and from there to the next group's rewards."""
    late, again = [], []
    for _ in range(HANGS):
        begin = time.perf_counter()
        try:
            await score(ENDLESS, DEADLINE_S)
        except (TimeoutError, DeadlineExceeded):
            late.append(time.perf_counter() - begin - DEADLINE_S)
        begin = time.perf_counter()
        await score(PARSED, 60.0)
        again.append(time.perf_counter() - begin)
    return statistics.median(late), statistics.median(again)


async def measure(kind: str, calls: int, workers: int) -> dict[str, float]:
    """Returns the figures of one pool."""
    async with POOLS[kind]("exact", workers) as score:
        quick = await calls_per_second(score, QUICK, calls, workers * IN_HAND)
    async with POOLS[kind]("math_verify", workers) as score:
        parsed = await calls_per_second(score, PARSED, max(1, calls // 10), workers * IN_HAND)
    async with POOLS[kind]("math_verify", 1) as score:
        late, again = await kill_latency(score)
    return {"quick_calls_per_s": quick, "math_calls_per_s": parsed, "late_ms": 1000 * late, "replaced_ms": 1000 * again}


def table(figures: dict[str, dict[str, float]]) -> str:
    """Returns the figures as a table in Markdown."""
    head = "| pool | groups/s, cheap verifier | groups/s, math-verify | error after the deadline | next group scored after |"
    rows = [head, "|---|---|---|---|---|"]
    for name, row in figures.items():
        rates = f"{row['quick_calls_per_s']:.0f} | {row['math_calls_per_s']:.0f}"
        rows.append(f"| {name} | {rates} | {row['late_ms']:.0f} ms | {row['replaced_ms']:.0f} ms |")
    return "\n".join(rows)


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS, metavar="N", help=f"calls of the cheap verifier (default {CALLS})")
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help=f"processes (default {WORKERS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds (default {ROUNDS})")
    parser.add_argument("--pools", nargs="+", default=list(POOLS), choices=list(POOLS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    rounds = [{kind: asyncio.run(measure(kind, options.calls, options.workers)) for kind in options.pools} for _ in range(options.rounds)]
    pools = {
        kind: {name: statistics.median(measured[kind][name] for measured in rounds) for name in rounds[0][kind]} for kind in options.pools
    }
    print(table(pools))
    if options.json:
        found = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "workers": options.workers,
            "calls": options.calls,
            "rounds": rounds,
            "pools": pools,
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
