"""What the sample path carries: samples per second from a producer through the real servers and the real buffer to a consumer.

``python -m benchmarks.sample_path [--json FILE] [--lengths L …] [--seconds S] [--repetitions N] [--no-ray]`` starts NATS and Valkey as
``myxo up`` does, the buffer as ``python -m services.buffer``, a producer (rollout and reward without an engine) and a consumer (a trainer
without a model). Groups of 8 samples are admitted, generated, scored, entered into the ledger, batched, read, compared bit by bit, trained,
and freed behind a checkpoint; every effect waits for what it waits for in a run. At the end the ledger must pass the audit, and
the store may hold no more than what is in flight.

A sample of L tokens is 256 of prompt and L - 256 of response: int32 tokens, float32 log-probs and uint8 mask of the response, 5.6 kB at
L = 768 and 74.8 kB at L = 8448; its text is empty. A batch is about 16 MiB (16 to 256 groups), `max_staleness` 4, a checkpoint durable
every 4 steps, everything else at its default. Figures are medians over repetitions of so many seconds, after a warm-up.

Beside them, from the same minutes: the limit, the same bytes SET and GET through pipelines on the same Valkey and nothing else;
and Ray as slime uses it, lists of Python numbers by `ray.put` and `ray.get` between two actors.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.sample_path import path, raw, ray_lists
from benchmarks.sample_path.content import SAMPLES, array_bytes

GOALS = {768: 25_000, 8448: 4_000}
"""Samples per second on two cores with nothing else to do."""

AOF = "everysec"
WARM_UP = 0.6
"""Of a repetition."""

Tell = Callable[[str], None]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(GOALS), metavar="L", help="tokens of a sample (default 768 8448)")
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S", help="of a repetition, at least (default 6)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each figure (default 3)")
    parser.add_argument("--no-ray", action="store_true", help=f"leave the Ray row out (it needs {ray_lists.INSTALL})")
    given = parser.parse_args()
    if min(given.lengths) <= 256:
        parser.error("--lengths: a sample has more than its 256 tokens of prompt")
    lengths, console = list(dict.fromkeys(given.lengths)), Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    parts = len(lengths) * (given.repetitions + (2 if given.no_ray else 3))
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("", total=parts)
            figures = measure(
                lengths,
                given.seconds,
                given.repetitions,
                not given.no_ray,
                lambda what: progress.update(bar, description=what),
                lambda: progress.advance(bar),
            )
    except ray_lists.RayMissing as missing:
        print(f"sample_path: {missing}", file=sys.stderr)
        return 2
    console.print(table(figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def measure(lengths: list[int], seconds: float, repetitions: int, with_ray: bool, tell: Tell, done: Callable[[], None]) -> dict[str, Any]:
    """All figures, by length. ``tell`` hears what is being measured, ``done`` is called when a part of it is."""
    ours: dict[str, dict[str, Any]] = {}
    rays: dict[str, tuple[float, float]] = {}
    if with_ray:  # first: where it is missing, nobody waits for the rest to hear so
        for length in lengths:
            tell(f"L = {length}, Ray")
            rays[str(length)] = ray_lists.pace(length, path.groups_per_batch(SAMPLES * array_bytes(length)), seconds / 2, repetitions)
            done()
    for length in lengths:
        ours[str(length)] = _ours(length, seconds, repetitions, tell, done)

    def by_length(name: str) -> dict[str, Any]:
        return {length: figures[name] for length, figures in ours.items()}

    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores, not reserved: load {os.getloadavg()[0]:.1f} at the end",
        "samples_per_s": by_length("samples_per_s"),
        "spread": by_length("spread"),
        "mb_per_s": by_length("mb_per_s"),
        "cpu_s_per_1000": by_length("cpu_s_per_1000"),
        "cpu_s_per_1000_by_process": by_length("by_process"),
        "cores_busy": by_length("cores_busy"),
        "raw_samples_per_s": by_length("raw"),
        "ray_samples_per_s": {length: round(pace) for length, (pace, _) in rays.items()} or None,
        "ray_cpu_s_per_1000": {length: round(cost, 4) for length, (_, cost) in rays.items()} or None,
        "goal_samples_per_s": {str(length): GOALS[length] for length in lengths if length in GOALS},
        "aof": AOF,
        "bytes_per_sample": {str(length): array_bytes(length) for length in lengths},
        "groups_per_batch": by_length("groups"),
        "samples_per_group": SAMPLES,
        "seconds": seconds,
        "repetitions": repetitions,
    }


def _ours(length: int, seconds: float, repetitions: int, tell: Tell, done: Callable[[], None]) -> dict[str, Any]:
    group_bytes = SAMPLES * array_bytes(length)
    groups = path.groups_per_batch(group_bytes)
    windows = []
    with path.room() as name, path.servers(Path(name), AOF) as running:
        run_config = path.config(Path(name), groups, length, AOF)
        asyncio.run(path.make(running, run_config))
        tell(f"L = {length}, warm-up")
        with path.Ends(running, run_config, length, Path(name)) as ends:
            ends.window(seconds * WARM_UP)
            done()
            for number in range(repetitions):
                tell(f"L = {length}, repetition {number + 1}")
                windows.append(ends.window(seconds))
                done()
        tell(f"L = {length}, audit and limit")
        asyncio.run(path.check(running, run_config, group_bytes))
        limit = statistics.median(raw.pace(running.valkey.url, os.urandom(group_bytes), SAMPLES, seconds / 3) for _ in range(repetitions))
        done()
    pace = statistics.median(window.pace for window in windows)
    return {
        "samples_per_s": round(pace),
        "spread": [round(min(window.pace for window in windows)), round(max(window.pace for window in windows))],
        "mb_per_s": round(pace * array_bytes(length) / 1e6, 1),
        "cpu_s_per_1000": round(statistics.median(window.cost() for window in windows), 4),
        "by_process": {name: round(statistics.median(window.cost(name) for window in windows), 4) for name in windows[0].cpu},
        "cores_busy": round(statistics.median(sum(window.cpu.values()) / window.seconds for window in windows), 2),
        "raw": round(limit),
        "groups": groups,
    }


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    shown = Table(title=f"The sample path, Valkey's log on {figures['aof']}")
    for column in ("L", "", "samples/s", "MB/s", "CPU s per 1,000", "goal", "of the limit"):
        shown.add_column(column, justify="right" if column else "left")
    rays, ray_costs = figures["ray_samples_per_s"] or {}, figures["ray_cpu_s_per_1000"] or {}
    goals, busy = figures["goal_samples_per_s"], figures["cores_busy"]
    for length, pace in figures["samples_per_s"].items():
        limit, cost = figures["raw_samples_per_s"][length], figures["cpu_s_per_1000"][length]
        rows: list[tuple[str, float, float | None, int | None]] = [("Myxo", pace, cost, goals.get(length)), ("limit", limit, None, None)]
        if length in rays:
            rows.append(("Ray, lists", rays[length], ray_costs[length], None))
        for name, samples, spent, goal in rows:
            megabytes = samples * figures["bytes_per_sample"][length] / 1e6
            told = ["" if spent is None else f"{spent:.3f}", "" if goal is None else f"{goal:,}", f"{samples / limit:.0%}"]
            shown.add_row(length, name, f"{samples:,.0f}", f"{megabytes:,.0f}", *told)
        shown.add_section()
    parts = [
        f"L = {length}: " + ", ".join(f"{name} {cost:.3f}" for name, cost in costs.items()) + f"; {busy[length]} cores busy"
        for length, costs in figures["cpu_s_per_1000_by_process"].items()
    ]
    shown.caption = "CPU seconds per 1,000 samples by process\n" + "\n".join(parts)
    return shown


if __name__ == "__main__":
    sys.exit(main())
