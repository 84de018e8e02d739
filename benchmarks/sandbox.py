"""How fast code runs in sandboxes: their start, one program, and whole checks through the reward service's worker processes; and how far
programs get beyond the limit of memory.

``python -m benchmarks.sandbox [--starts N] [--checks N] [--workers N] [--rounds N] [--json FILE] [--write]``. *Start*: from the call to the
first program's end, of a sandbox that has to be made and of one that a pool has made before it was needed. *Program*: one line of Python in
a sandbox that is there, beside a plain ``python -c`` without any. *Check*: a response whose code is taken out and run against three tests,
in a sandbox that nobody has used; the tests a second are three times as many. *Beyond the limit*: the most memory that programs which take
it as fast as they can had when they were ended, over a limit of `HOGS_LIMIT`. Of several rounds the quietest counts for what takes time,
the one in which starts from the pool were fastest, and the worst for memory. Exit code 1 where half of the starts from the pool take more
than `MOST_MS`, or fewer than `LEAST` checks are done in a second. ``--write`` puts the figures of `RESULT` into docs/sandbox.md.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.command_line import machine, parsed, write
from benchmarks.page_table import markdown_table, put_table
from services.reward.scorer import Verification, VerifierPool
from shared.config.service_sections import SandboxSection
from shared.rewards.names import queue_of
from shared.rewards.reference import Reference
from shared.runtime.errors import MyxoError
from shared.sandbox.program import Program, SandboxLimits, SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxPool
from shared.sandbox.sandbox_command import interpreter

ROOT = Path(__file__).resolve().parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "sandbox.json", ROOT / "docs" / "sandbox.md"

STARTS, CHECKS, WORKERS, ROUNDS = 60, 300, 2, 3
MOST_MS, LEAST = 10.0, 50.0
"""The most that half of the starts from the pool may take, and the fewest checks a second, on two cores."""

NAME = "unit_tests"
IN_HAND = 2
"""The groups that each worker has in hand."""

GROUP = 4
DEADLINE_S = 60.0
PAUSE_S = 0.05
"""The pause before each start from the pool, in which the next sandbox is made: a check does not come on the heels of another."""

HOGS_LIMIT, HOGGED = 128 << 20, 6
"""Bytes, and how often each hog runs in a round."""

_SHARED = "import ctypes, mmap, os, threading\nheld = mmap.mmap(-1, 1 << 34)\nat = ctypes.addressof(ctypes.c_char.from_buffer(held))\n"
HOGS = {
    "list": "held = []\nwhile True: held.append(b'x' * (1 << 20))",
    "threads": _SHARED + "for n in range(8): threading.Thread(target=ctypes.memset, args=(at + (n << 30), 1, 1 << 30)).start()",
    "processes": _SHARED + "for _ in range(4): os.fork()\nctypes.memset(at + (os.getpid() % 16 << 30), 1, 1 << 30)",
    "processes_at_once": "import os, time\nfor _ in range(4): os.fork()\ntime.sleep(0.05)\nheld = bytearray(180 << 20)\ntime.sleep(5)",
}
"""Programs that take memory: private or shared, by one process or by sixteen."""

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


def beyond_the_limit() -> dict[str, float]:
    """Returns the most MiB over the limit that each of `HOGS` had. Raises MyxoError where one was not ended for it."""
    limits, most = SandboxLimits(wall_s=60, cpu_s=60, memory_bytes=HOGS_LIMIT), dict[str, float]()
    with Sandbox(SandboxSettings(limits=limits)) as sandbox:
        for name, source in HOGS.items():
            results = [sandbox.run(Program(sources=(source,))) for _ in range(HOGGED)]
            if others := {result.status for result in results} - {"memory"}:
                raise MyxoError(f"{name} ended by {others}")
            most[name] = max(result.memory_bytes - HOGS_LIMIT for result in results) / (1 << 20)
    return most


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


NAMES = {
    "start": "sandbox made, one line of Python run, sandbox ended",
    "start_from_pool": "sandbox from the pool, one line of Python run",
    "program": "one line of Python in a sandbox that is there",
    "without_sandbox": "`python -c`, without a sandbox",
}


def speeds(found: Mapping[str, Any]) -> str:
    """Returns the times of starts and programs as a table in Markdown."""
    rows = ([name, *(f"{found[key][at]:.1f} ms" for at in ("p50_ms", "p99_ms", "least_ms"))] for key, name in NAMES.items())
    return markdown_table(("", "half take", "99 in 100 take", "the fastest"), rows)


def table(found: dict[str, dict[str, float]], checks: float, over: dict[str, float], workers: int) -> str:
    """Returns the figures as a table in Markdown."""
    hogs = ", ".join(f"{name} {mib:.0f}" for name, mib in over.items())
    told = f"{checks:.0f} checks of three tests a second by {workers} workers (at least {LEAST:g}); {machine()}"
    return "\n".join([speeds(found), "", told, "", f"MiB beyond a limit of {HOGS_LIMIT >> 20}: {hogs}"])


def main() -> int:
    """The command line. Returns the exit code."""
    options = parsed(
        __doc__,
        writes=True,
        starts=(STARTS, "sandboxes that are started, each way"),
        checks=(CHECKS, "responses that are checked"),
        workers=(WORKERS, "processes that check"),
        rounds=(ROUNDS, "rounds"),
    )
    if options.write:
        kept = json.loads(RESULT.read_text())
        put_table(PAGE, "sandbox", f"{speeds(kept)}\n\n{kept['checks_per_s']:.0f} responses with three tests each are checked in a second.")
        return 0
    rounds = [
        (starts(options.starts), asyncio.run(checks_per_second(options.checks, options.workers)), beyond_the_limit())
        for _ in range(options.rounds)
    ]
    found, checks, _ = min(rounds, key=lambda each: each[0]["start_from_pool"]["p50_ms"])
    over = {name: max(each[2][name] for each in rounds) for name in HOGS}
    print(table(found, checks, over, options.workers))
    figures = {"checks_per_s": checks, "tests_per_s": 3 * checks, "workers": options.workers, **found, "mib_beyond_the_limit": over}
    write(options.json, figures)
    return int(found["start_from_pool"]["p50_ms"] > MOST_MS or checks < LEAST)


if __name__ == "__main__":
    sys.exit(main())
