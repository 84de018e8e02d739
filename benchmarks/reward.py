"""Groups scored by the reward service's worker processes, beside a plain loop over the same library.

``python -m benchmarks.reward [--groups N] [--workers N] [--rounds N] [--json FILE]`` scores the same groups of eight responses in both
ways, in turns: no two answers of a group are the same, and labels are fractions, roots and polynomials. The loop calls the library in this
process, with nothing around it: no deadline, no process that can be killed. The table has the groups a second, the processor time of a
group, and the time from a group's hand-in to its rewards with as many groups in hand as the service has. Exit code 1 below `LEAST`.
"""

import asyncio
import logging
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import math_verify

from benchmarks.command_line import machine, parsed, write
from services.reward.scorer import IN_HAND, Verification, VerifierPool
from shared.rewards.names import queue_of
from shared.rewards.reference import Reference
from shared.runtime.errors import MyxoError

GROUPS, WORKERS, ROUNDS, SAMPLES = 300, 2, 3, 8
LEAST = 1.6
"""The least that the groups a second may be, of two workers on two cores, as a multiple of the loop's."""

DEADLINE_S = 60.0

WORKING = "Let us look at it step by step. " + "So it continues. " * 20

NAME = "math_verify"


def by_math_verify(response: str, label: str) -> float:
    """Returns what the library math-verify says, as its page shows it."""
    truth, answer = (math_verify.parse(text, parsing_timeout=None) for text in (f"${label}$", response))
    return float(math_verify.verify(truth, answer, timeout_seconds=None))


@dataclass(frozen=True)
class BenchmarkGroup:
    """The responses to one prompt, and its label."""

    responses: list[str]
    label: str


def groups(count: int) -> list[BenchmarkGroup]:
    """Returns groups whose labels are fractions, roots and polynomials, with right and wrong answers to each."""
    made = []
    for number in range(count):
        left, right = 2 + number % 89, 3 + number % 97
        label, forms = (
            (f"\\frac{{{left}}}{{{right}}}", [f"{left}/{right}", f"\\frac{{{2 * left}}}{{{2 * right}}}", f"{left / right:.9f}"]),
            (f"{left}\\sqrt{{{right}}}", [f"{left} \\sqrt{{{right}}}", f"\\sqrt{{{left * left * right}}}", f"{left}"]),
            (f"x^2+{left}x+{right}", [f"{right}+{left}x+x^2", f"x(x+{left})+{right}", f"x^2-{left}x+{right}"]),
        )[number % 3]
        said = [*forms, label, str(left), f"-{label}", f"{label}+1", str(right * 7919)]
        made.append(BenchmarkGroup([f"{WORKING}The answer is \\boxed{{{answer}}}." for answer in said[:SAMPLES]], label))
    return made


def looped(given: list[BenchmarkGroup]) -> tuple[dict[str, float], list[list[float]]]:
    """Returns the figures of the loop, and its rewards."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no deadline
    by_math_verify("\\boxed{x}", "\\frac{1}{2}")  # what is imported late
    began, used = time.perf_counter(), time.process_time()
    rewards = [[by_math_verify(response, group.label) for response in group.responses] for group in given]
    return _figures(given, time.perf_counter() - began, time.process_time() - used), rewards


async def pooled(given: list[BenchmarkGroup], workers: int) -> tuple[dict[str, float], list[list[float]]]:
    """Returns the figures of the worker processes, and their rewards. Raises MyxoError where a response was not verified."""
    pool, waiting, rewards = VerifierPool(queue_of(NAME), [NAME], workers), iter(enumerate(given)), dict[int, list[float]]()
    waits: list[float] = []

    async def ask() -> None:
        for index, group in waiting:
            handed_in = time.perf_counter()
            scores = await pool.score(Verification(NAME, group.responses, [Reference(group.label)]), DEADLINE_S)
            waits.append(time.perf_counter() - handed_in)
            if unread := [score.unread for score in scores if score.unread]:
                raise MyxoError(f"group {index}: {unread[0]}")
            rewards[index] = [score.reward for score in scores]

    await pool.start()
    try:
        began, used = time.perf_counter(), time.process_time() + _of_workers(pool)
        await asyncio.gather(*(ask() for _ in range(workers * IN_HAND)))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() + _of_workers(pool) - used
    finally:
        await pool.close()
    percentiles = statistics.quantiles(waits, n=100)
    found = {**_figures(given, seconds, cpu_s), "p50_ms": 1000 * percentiles[49], "p99_ms": 1000 * percentiles[98]}
    return found, [rewards[index] for index in range(len(given))]


def _figures(given: list[BenchmarkGroup], seconds: float, cpu_s: float) -> dict[str, float]:
    return {"groups_per_s": len(given) / seconds, "cpu_ms_per_group": 1000 * cpu_s / len(given), "cores": cpu_s / seconds}


def _of_workers(pool: VerifierPool) -> float:
    """Returns the processor time of the pool's processes, and of what they have started."""
    pids = [process.pid for process in pool.processes]
    for pid in pids:
        pids += [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(entry[11]) + int(entry[12]) for entry in fields) / os.sysconf("SC_CLK_TCK")


def measured(given: list[BenchmarkGroup], workers: int, rounds: int) -> dict[str, Any]:
    """Returns the medians of both sides, how many times as many groups a second the processes score, and how many rewards agree.

    ``ratio_by_cpu`` is what the processor time alone says, as if each worker had a core of its own: on a machine that others use, it is the
    steadier figure.
    """
    loops, pools = list[dict[str, float]](), list[dict[str, float]]()
    for _ in range(rounds):
        figures, expected = looped(given)
        loops.append(figures)
        figures, rewards = asyncio.run(pooled(given, workers))
        pools.append(figures)
    loop, pool = ({key: statistics.median(entry[key] for entry in side) for key in side[0]} for side in (loops, pools))
    agree = sum(left == right for row, other in zip(expected, rewards, strict=True) for left, right in zip(row, other, strict=True))
    return {
        "loop": loop,
        "pool": pool,
        "ratio": pool["groups_per_s"] / loop["groups_per_s"],
        "ratio_by_cpu": workers * loop["cpu_ms_per_group"] / pool["cpu_ms_per_group"],
        "agree": agree / (len(given) * SAMPLES),
    }


def table(found: dict[str, Any], workers: int) -> str:
    """Returns the figures as a table in Markdown, with the limit beside them."""
    rows = ["| | groups/s | CPU ms a group | half wait | 99 in 100 wait |", "|---|---|---|---|---|"]
    for name, side in (("plain loop", found["loop"]), (f"{workers} worker processes", found["pool"])):
        waits = f"{side['p50_ms']:.0f} ms | {side['p99_ms']:.0f} ms" if "p50_ms" in side else "| "
        rows.append(f"| {name} | {side['groups_per_s']:.1f} | {side['cpu_ms_per_group']:.1f} | {waits} |")
    ratios = f"{found['ratio']:.2f} times the groups a second (at least {LEAST}), {found['ratio_by_cpu']:.2f} times by processor time"
    return "\n".join([*rows, "", f"{ratios}; {100 * found['agree']:.1f} % of the rewards agree; {machine()}"])


def main() -> int:
    """The command line. Returns the exit code."""
    options = parsed(__doc__, groups=(GROUPS, f"groups of {SAMPLES} responses"), workers=(WORKERS, "processes"), rounds=(ROUNDS, "rounds"))
    found = measured(groups(options.groups), options.workers, options.rounds)
    print(table(found, options.workers))
    sizes = {"groups": options.groups, "samples": SAMPLES, "workers": options.workers, "rounds": options.rounds, "least": LEAST}
    write(options.json, {**sizes, **found})
    return int(max(found["ratio"], found["ratio_by_cpu"]) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
