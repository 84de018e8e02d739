"""A run's plan as tables for people and as one JSON object."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from myxo.plan.remedies import remedies
from myxo.plan.run_plan import MemoryNeed, RunPlan
from shared.model.memory_plan import total_parameters

GB = 1e9

MOST_REMEDIES = 6

LEGEND = "working: logits of a chunk of tokens, or what the backward pass of a layer needs for a moment, whichever is more"


def trainer_table(plan: RunPlan) -> Table | None:
    """Returns a column for each kind of trainer's rank; None where the run has no trainer."""
    needs = [need for need in plan.needs if need.role != "engine"]
    if not needs:
        return None
    table = _table("trainer, a rank", [need.of for need in needs])
    table.add_row("ranks", *(str(need.ranks) for need in needs))
    for name in dict.fromkeys(name for need in needs for name in need.parts):
        table.add_row(name, *(_gb(need.parts.get(name, 0)) for need in needs))
    table.add_row("together", *(Text(_gb(need.total), style="bold" if need.fits else "bold red") for need in needs))
    table.add_row("of a GPU's", *(_gb(need.available) for need in needs))
    table.add_row("host memory", *(_gb(need.host) for need in needs))
    return table


def engine_table(plan: RunPlan) -> Table | None:
    """Returns what is planned of an engine's GPU; None where the run has no engine."""
    engine = plan.engine
    if engine is None:
        return None
    table = _table("engine, a GPU", [])
    table.add_column("")
    table.add_row("engines x GPUs", f"{plan.config.rollout.rollout_replicas} x {engine.gpus}")
    table.add_row("weights", _gb(engine.weights))
    table.add_row("KV cache", _gb(engine.cache))
    table.add_row("together, at most", f"{_gb(engine.budget)} = {engine.share:.3g} of a GPU's {_gb(plan.gpu_bytes)}")
    caches = f" in each of {engine.copies} caches" if engine.copies > 1 else ""
    table.add_row("tokens in the cache", f"{engine.tokens:,}{caches}, of {engine.token_bytes:,} bytes")
    table.add_row("longest sequences", f"{engine.tokens // engine.longest:,} of {engine.longest:,} tokens")
    return table


def verdicts(plan: RunPlan) -> Iterator[str]:
    """Yields what does not fit, why, and which flags would lower it."""
    for need in plan.needs:
        if need.fits:
            continue
        yield problem(need)
        found = remedies(plan, need)
        for remedy in found[:MOST_REMEDIES]:
            yield f"  {remedy.flags}: {_gb(remedy.total)} GB{', which fits' if remedy.fits else ''}"
        if not found:
            yield "  no single flag lowers it: take more or larger GPUs, or a smaller model"


def problem(need: MemoryNeed) -> str:
    """Returns in a sentence what does not fit."""
    return (
        f"{need.of}: needs {_gb(need.total)} GB of a GPU, there are {_gb(need.available)}; "
        f"most of it: {need.largest}, {_gb(need.parts[need.largest])} GB"
    )


def as_json(plan: RunPlan, notes: list[str]) -> dict[str, Any]:
    """Returns the plan as plain values; sizes are bytes."""
    engine = plan.engine
    return {
        "fits": plan.fits,
        "gpu_bytes": plan.gpu_bytes,
        "parameters": total_parameters(plan.architecture),
        "needs": [
            {
                "of": need.of,
                "role": need.role,
                "ranks": need.ranks,
                "parts": dict(need.parts),
                "total": need.total,
                "available": need.available,
                "host": need.host,
                "fits": need.fits,
                "largest": need.largest,
                "remedies": [] if need.fits else [vars(remedy) for remedy in remedies(plan, need)],
            }
            for need in plan.needs
        ],
        "stages": {role: [stage.as_json() for stage in plan.stages(role)] for role in ("actor", "critic") if plan.stages(role)},
        "engine": None if engine is None else {**vars(engine), "cache": engine.cache},
        "notes": notes,
    }


def _table(first: str, columns: list[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True, min_width=20)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _gb(size: int) -> str:
    return f"{size / GB:.1f}"
