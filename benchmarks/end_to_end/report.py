"""What the figures of `benchmarks.end_to_end` come to: the limit, what misses its goal, and the table of docs/performance.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page_table import put_table

GOAL, GOAL_BOUND = 0.95, 2
"""The share of the limit that is to be reached from this bound on."""

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def split(g: float, h: float, synchronous: float, gpus: int, shared: bool) -> dict[str, float]:
    """Returns the limit of a step, and the share of the GPUs' time that the synchronous run uses.

    Args:
        g, h: seconds of generation and of training a step. synchronous: seconds of its step. shared: both take turns on the same device.
    """
    limit = g + h if shared else max(g, h)
    return {
        "generation_seconds": round(g, 4),
        "training_seconds": round(h, 4),
        "limit_seconds": round(limit, 4),
        "synchronous_use": round((g + h) / (gpus * synchronous), 4),
    }


def misses(found: Mapping[str, Any]) -> list[str]:
    """Returns what misses its goal, in words."""
    runs: Sequence[Mapping[str, Any]] = found["runs"]
    missed = [f"bound {run['bound']}: {run['stopped']}" for run in runs if "step_seconds" not in run and "stopped" in run]
    known = {run["bound"]: run for run in runs if "step_seconds" in run}
    for bound, run in known.items():
        if bound >= GOAL_BOUND and not found["colocate"] and run.get("of_limit", 1.0) < GOAL:
            missed.append(f"bound {bound}: {run['of_limit']:.0%} of the limit; the goal is {GOAL:.0%}")
        if 0 in known and run["step_seconds"] > known[0]["step_seconds"]:
            missed.append(f"bound {bound}: slower than the synchronous run")
    return missed


def table(found: Mapping[str, Any]) -> str:
    """Returns the table of one measurement, in Markdown."""
    head = (
        "| bound | step | of the limit | predicted | trained tokens/s | a GPU | generated tokens/s | GPUs busy | requests that run | "
        "staleness, mean and most | dropped, masked tokens |"
    )
    lines = [head, "|---" * 11 + "|"]
    for run in found["runs"]:
        if "step_seconds" not in run:
            lines.append(f"| {run['bound']} | {run.get('problem', '')} |" + " |" * 9)
            continue
        lines.append(
            f"| {run['bound']} | {run['step_seconds']:.2f} s | {_share(run.get('of_limit'))} | {_seconds(run.get('predicted_seconds'))} "
            f"| {run['trained_tokens_per_s']:,.0f} | {run['trained_tokens_per_s_per_gpu']:,.0f} | {run['generated_tokens_per_s']:,.0f} "
            f"| {', '.join(_share(busy) for busy in run.get('gpu_busy', [])) or '—'} | {_number(run.get('running_requests'))} "
            f"| {_number(run['staleness_mean'], 2)}, {run['staleness_max']:.0f} | {run['dropped_tokens']:,}, {run['masked_tokens']:,.0f} |"
        )
    return "\n".join(lines)


def alone(found: Mapping[str, Any]) -> str:
    """Returns the sentence about engine and trainer alone."""
    if "split" not in found:
        return ""
    best = max(found["alone"], key=lambda one: one["tokens_per_s"])
    share = found["split"]
    return (
        f"Alone, the engine draws {best['tokens_per_s']:,.0f} tokens a second with {best['running']:.0f} requests running: "
        f"g = {share['generation_seconds']:.2f} s a step; training takes h = {share['training_seconds']:.2f} s. "
        f"Limit {share['limit_seconds']:.2f} s a step, U_sync = {share['synchronous_use']:.2f}."
    )


def write_page(measurements: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> None:
    """Puts tables and sentences into the page."""
    parts = []
    for found in [measurements] if isinstance(measurements, Mapping) else measurements:
        work = f"{found['shape']}, {found['lengths']}, cap {found['cap']}, {found['batch']} x {found['samples']} samples a step"
        what = f"{work}, {found['gpus']} GPU"
        order = f", {found['order']} order" if found.get("order", "completion") != "completion" else ""
        plural, shared = "s" if found["gpus"] > 1 else "", ", colocated" if found["colocate"] else ""
        parts.append(f"**{what}{plural}{order}{shared}**\n\n{table(found)}\n\n{alone(found)}")
    put_table(PAGE, "end_to_end", "\n\n".join(parts))


def _share(value: float | None) -> str:
    return "—" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f} s"


def _number(value: float | None, digits: int = 0) -> str:
    return "—" if value is None else f"{value:.{digits}f}"
