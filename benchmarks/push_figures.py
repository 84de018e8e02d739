"""What pushes came to: medians, phases, and where the time between the trainer's question and its answer went. Pure."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.page_table import markdown_table

if TYPE_CHECKING:
    from services.trainer.weights.push_schedule import PushResult

MARKS = {
    "receive_began": "the trainer asks the replicas to receive",
    "asked": "the rollout service has the request",
    "first_sent": "the trainer has issued the first bucket",
    "begun": "the receiver has issued its first broadcasts",
    "paused": "the engine was told to pause",
    "scheduler": "the paused scheduler calls the loader",
    "first_bucket": "the first bucket is there",
    "issued": "the trainer has issued the last bucket",
    "arrived": "the last bucket is there",
    "sent": "the last bucket has left the trainer",
    "loaded": "everything is loaded",
    "checked": "the receiver knows its digest",
    "reported": "the rollout service answers",
    "check_began": "the trainer has all answers",
    "commit_began": "the digests are equal; the trainer asks for the commit",
    "commit_asked": "the rollout service has the commit",
    "named": "the engine names the version",
    "resumed": "the engine continues",
    "ended": "the trainer knows that it is served",
}
"""The marks of a push (`PushResult.marks`) in the order of their usual times, and what each says."""


PHASES = ("pause", "transfer", "check", "activate")
"""`PushResult.phases`."""


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share - 1e-9) - 1)]


def times_of(result: "PushResult") -> dict[str, float]:
    """Returns mark → seconds since the trainer's request, of the slowest replica."""
    trainer = result.marks["trainer"]
    replicas = [marks for name, marks in result.marks.items() if name != "trainer"]
    slowest = max(replicas, key=lambda marks: marks.get("reported", 0.0), default={})
    began = trainer["receive_began"]
    found = {**slowest, **trainer, "ended": trainer["prepare_began"] + result.seconds}
    return {mark: at - began for mark, at in found.items() if mark in MARKS}


def figures_of(results: Sequence["PushResult"]) -> dict[str, Any]:
    """Returns the figures of some pushes: seconds, GB/s, phases."""
    best = min(results, key=lambda result: result.wire_seconds)
    times = [times_of(result) for result in results]

    return {
        "pushes": len(results),
        "bytes": best.bytes,
        "seconds": round(best.wire_seconds, 5),
        "median_seconds": round(statistics.median(result.wire_seconds for result in results), 5),
        "p99_seconds": round(percentile([result.wire_seconds for result in results], 0.99), 5),
        "engine_seconds": round(best.engine_seconds, 5),
        "push_seconds": round(statistics.median(result.seconds for result in results), 5),
        "p99_push_seconds": round(percentile([result.seconds for result in results], 0.99), 5),
        "gb_per_s": round(best.bytes / best.wire_seconds / 1e9, 1),
        "phases": {phase: round(statistics.median(result.phases[phase] for result in results), 5) for phase in PHASES},
        "trace": trace_of(times),
    }


def trace_of(times: Sequence[Mapping[str, float]]) -> list[list[Any]]:
    """Returns of each mark its name, and the median, 90th percentile and largest milliseconds since the trainer's request."""

    def row(mark: str) -> list[Any]:
        values = [each[mark] * 1e3 for each in times if mark in each]
        return [mark, *(round(value, 2) for value in (statistics.median(values), percentile(values, 0.9), max(values)))]

    rows = [row(mark) for mark in MARKS if any(mark in each for each in times)]
    return sorted(rows, key=lambda each: float(each[1]))


def trace_table(title: str, trace: Sequence[Sequence[Any]]) -> str:
    """Returns the trace as text, for a terminal."""
    lines = [f"{title}: milliseconds since the trainer's request", f"{'median':>8} {'p90':>8} {'worst':>8}"]
    lines += [f"{median:8.2f} {high:8.2f} {worst:8.2f}  {mark:<14} {MARKS[mark]}" for mark, median, high, worst in trace]
    return "\n".join(lines)


def page_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the figures as a table of the documentation, the limit beside them."""

    def cells(row: Mapping[str, Any]) -> Iterator[str]:
        raw = row.get("raw_gb_per_s")
        limit = row["bytes"] / raw / 1e6 if raw else None
        yield f"{row['gpus']} {row.get('device', '')}".strip()
        yield row["layout"]
        yield f"{row['bytes'] / 1e9:.2f}"
        yield f"{limit:.1f}" if limit else "–"
        yield ", ".join(f"{row[name] * 1e3:.1f}" for name in ("seconds", "median_seconds", "p99_seconds") if name in row)
        yield f"{limit / row['seconds'] / 10:.0f} %, {limit / row['median_seconds'] / 10:.0f} %" if limit else "–"
        yield f"{row['engine_seconds'] * 1e3:.1f}"
        yield ", ".join(f"{row['phases'][phase] * 1e3:.1f}" for phase in PHASES) if "phases" in row else "–"
        during = row.get("generating")
        yield f"{during['gap_p50'] * 1e3:.0f}, {during['gap_p99'] * 1e3:.0f}" if during and "gap_p50" in during else "–"
        yield f"{during['median_seconds'] * 1e3:.1f}, {during['p99_seconds'] * 1e3:.1f}" if during else "–"
        yield f"{row['stall_seconds'] * 1e3:.1f}" if "stall_seconds" in row else "–"
        yield f"{row['bytes'] / row['slime_way_gb_per_s'] / 1e6:.0f}" if "slime_way_gb_per_s" in row else "–"

    heads = ["GPUs", "layout", "GB", "raw", "push: best, median, p99", "of raw: best, median", "engine's part"]
    heads += ["pause, transfer, check, activate", "gap in generation: p50, p99", "push then: median, p99", "stall", "slime's way"]
    died = [row for row in rows if "death" in row]
    return "\n".join([markdown_table(heads, map(cells, rows)), *(["", *death_rows(died)] if died else [])])


def death_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table of what followed deaths inside a push; see `benchmarks.push_death`."""
    heads = [
        "an engine killed inside a push of",
        "it is named",
        "the other serves",
        "its successor is up",
        "and serves",
        "taken from the other",
    ]

    def cells(row: Mapping[str, Any]) -> Iterator[str]:
        death = row["death"]
        yield f"{row['bytes'] / 1e9:.2f} GB, {row['layout']}"
        for name in ("named", "served", "engine_up", "joined"):
            yield f"{death[name]:.1f} s"
        yield f"{death['peer_bytes'] / 1e9:.2f} GB in {death['peer_seconds']:.2f} s"

    return markdown_table(heads, map(cells, rows)).splitlines()
