"""How fast code runs in sandboxes: their start, one program, and whole checks through the reward service's worker processes.

``python -m benchmarks.sandbox [--starts N] [--checks N] [--workers N] [--json FILE]``. *Start*: from the call to the first program's end,
of a sandbox that has to be made and of one that a pool has made before it was needed. *Program*: one line of Python in a sandbox that is
there, beside a plain ``python -c`` without any. *Check*: a response whose code is taken out and run against three tests, in a sandbox
that nobody has used; the tests a second are three times as many. Exit code 1 where half of the starts from the pool take more than
`MOST_MS`, or fewer than `LEAST` checks are done in a second.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from services.reward.scoring_pools import Verification, VerifierPool
from shared.config.sandbox_section import SandboxSection
from shared.rewards.names import queue_of
from shared.rewards.reference import Reference
from shared.runtime.errors import MyxoError
from shared.sandbox.bwrap_command import interpreter
from shared.sandbox.program import Program, SandboxSettings
from shared.sandbox.sandbox import Sandbox
from shared.sandbox.sandbox_pool import SandboxPool

STARTS, CHECKS, WORKERS = 60, 300, 2
MOST_MS, LEAST = 10.0, 50.0
"""The most that half of the starts from the pool may take, and the fewest checks a second, on two cores."""

NAME = "unit_tests"
IN_HAND = 2
"""The groups that each worker has in hand."""

GROUP = 4
DEADLINE_S = 60.0
PAUSE_S = 0.05
"""The pause before each start from the pool, in which the next sandbox is made: a check does not come on the heels of another."""

ONE_LINE = Program(sources=("print(1)",))
RESPONSE = "The sum of both.\n```python\ndef add(a, b):\n    return a + b\n```\n"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\nassert add('a', 'b') == 'ab'"


def timed(work: Callable[[], object], count: int) -> dict[str, float]:
    """Returns the percentiles of the milliseconds that ``work`` takes."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    percentiles = statistics.quantiles(taken, n=100)
    return {"p50_ms": statistics.median(taken), "p99_ms": percentiles[98], "least_ms": min(taken)}


def starts(count: int) -> dict[str, dict[str, float]]:
    """Returns how long starts and programs take."""
    settings = SandboxSettings()

    def cold() -> None:
        with Sandbox(settings) as sandbox:
            sandbox.run(ONE_LINE)

    pool = SandboxPool(settings)
    pool.fill()
    warm = []
    for _ in range(count):
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        with pool.sandbox() as sandbox:
            sandbox.run(ONE_LINE)
            warm.append(1000 * (time.perf_counter() - began))
    pool.close()
    with Sandbox(settings) as sandbox:
        sandbox.run(ONE_LINE)
        programs = timed(lambda: sandbox.run(ONE_LINE), count)
    bare = timed(lambda: subprocess.run([interpreter(), "-c", "print(1)"], stdout=subprocess.DEVNULL, check=True), count)
    pooled = {"p50_ms": statistics.median(warm), "p99_ms": statistics.quantiles(warm, n=100)[98], "least_ms": min(warm)}
    return {"start": timed(cold, count), "start_from_pool": pooled, "program": programs, "without_sandbox": bare}


async def checks_per_second(count: int, workers: int) -> float:
    """Returns the rate at which responses are checked. Raises MyxoError where one was not."""
    pool, left = VerifierPool(queue_of(NAME), [NAME], workers, sandbox=SandboxSection()), iter(range(count // GROUP))
    group = Verification(NAME, [RESPONSE] * GROUP, [Reference(TESTS)])

    async def ask() -> None:
        for _ in left:
            scores = await pool.score(group, DEADLINE_S)
            if wrong := [score for score in scores if score.reward != 1.0]:
                raise MyxoError(f"a right response was not found right: {wrong[0]}")

    await pool.start()
    try:
        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(workers * IN_HAND)))
        return count // GROUP * GROUP / (time.perf_counter() - began)
    finally:
        await pool.close()


def table(found: dict[str, dict[str, float]], checks: float, workers: int) -> str:
    """Returns the figures as a table in Markdown."""
    names = {
        "start": "sandbox made, one line of Python run, sandbox ended",
        "start_from_pool": "sandbox from the pool, one line of Python run",
        "program": "one line of Python in a sandbox that is there",
        "without_sandbox": "`python -c`, without a sandbox",
    }
    rows = ["| | half take | 99 in 100 take | the fastest |", "|---|---|---|---|"]
    rows += [f"| {names[key]} | {row['p50_ms']:.1f} ms | {row['p99_ms']:.1f} ms | {row['least_ms']:.1f} ms |" for key, row in found.items()]
    machine = f"{os.cpu_count()} cores, {os.getloadavg()[0]:.1f} processes wanted one in the last minute"
    return "\n".join([*rows, "", f"{checks:.0f} checks of three tests a second by {workers} workers (at least {LEAST:g}); {machine}"])


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=STARTS, metavar="N", help=f"sandboxes that are started, each way (default {STARTS})")
    parser.add_argument("--checks", type=int, default=CHECKS, metavar="N", help=f"responses that are checked (default {CHECKS})")
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help=f"processes that check (default {WORKERS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    found, checks = starts(options.starts), asyncio.run(checks_per_second(options.checks, options.workers))
    print(table(found, checks, options.workers))
    if options.json:
        head = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        figures = {"checks_per_s": checks, "tests_per_s": 3 * checks, "workers": options.workers, **found}
        options.json.write_text(json.dumps({**head, **figures}, indent=2) + "\n")
    return int(found["start_from_pool"]["p50_ms"] > MOST_MS or checks < LEAST)


if __name__ == "__main__":
    sys.exit(main())
