"""What the figures of `benchmarks.end_to_end` come to: the limit, what misses its goal, and the table of docs/performance.md."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page_table import put_table

GOAL, GOAL_BOUND = 0.95, 2
"""The share of the limit that is to be reached from this bound on."""

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def split(g: float, h: float, synchronous: float, gpus: int, shared: bool, engines: int = 1) -> dict[str, float]:
    """Returns the limit of a step, and the share of the GPUs' time that the synchronous run uses.

    Args:
        g, h: seconds of one engine's generation and of training a step. synchronous: seconds of its step. shared: both take turns on the
            same device. engines: that generate at the same time, each on a device of its own.
    """
    return {
        "generation_seconds": round(g if shared else g / engines, 4),
        "training_seconds": round(h, 4),
        "limit_seconds": round(limit(g, h, shared, engines), 4),
        "synchronous_use": round((g + h) / (gpus * synchronous), 4),
    }


def limit(g: float, h: float, shared: bool, engines: int) -> float:
    """Returns the seconds of a step that nothing can be faster than; arguments as of `split`."""
    return g + h if shared else max(g / engines, h)


def misses(found: Mapping[str, Any]) -> list[str]:
    """Returns what misses its goal, in words."""
    runs: Sequence[Mapping[str, Any]] = found["runs"]
    missed = [f"bound {run['bound']}: {run['stopped']}" for run in runs if "step_seconds" not in run and "stopped" in run]
    known = [run for run in runs if "step_seconds" in run]
    synchronous = min((run["step_seconds"] for run in known if run["bound"] == 0), default=None)
    for run in known:
        if run["bound"] >= GOAL_BOUND and not found["colocate"] and run.get("of_limit", 1.0) < GOAL:
            missed.append(f"bound {_bound(run)}: {run['of_limit']:.0%} of the limit; the goal is {GOAL:.0%}")
        if run["bound"] and synchronous is not None and run["step_seconds"] > synchronous:
            missed.append(f"bound {_bound(run)}: slower than the synchronous run")
    return missed + [f"bound {run['bound']}: {what}" for run in runs if "scaled" in run for what in _scaling_misses(run)]


def _scaling_misses(run: Mapping[str, Any]) -> Iterator[str]:
    after, audit = run["scaled"]["after"], run.get("audit", {"ok": True})
    if "step_seconds" not in after:
        yield f"not measured after it was scaled: {after['problem']}; {run.get('stopped', '')}"
    if not audit["ok"]:
        yield f"its audit: {audit.get('violations') or audit.get('problem')}"


def table(found: Mapping[str, Any]) -> str:
    """Returns the table of one measurement, in Markdown."""
    head = (
        "| bound | step | steps measured | of the limit | predicted | trained tokens/s | a GPU | generated tokens/s | GPUs busy "
        "| requests that run | staleness, mean and most | dropped, masked tokens |"
    )
    lines = [head, "|---" * 12 + "|"]
    for run in found["runs"]:
        if "step_seconds" not in run:
            lines.append(f"| {_bound(run)} | {run.get('problem', '')} |" + " |" * 10)
            continue
        lines.append(
            f"| {_bound(run)} | {run['step_seconds']:.2f} s | {run['steps']} | {_share(run.get('of_limit'))} "
            f"| {_seconds(run.get('predicted_seconds'))} | {run['trained_tokens_per_s']:,.0f} "
            f"| {run['trained_tokens_per_s_per_gpu']:,.0f} | {run['generated_tokens_per_s']:,.0f} "
            f"| {', '.join(_share(busy) for busy in run.get('gpu_busy', [])) or '—'} | {_number(run.get('running_requests'))} "
            f"| {_number(run['staleness_mean'], 2)}, {run['staleness_max']:.0f} | {run['dropped_tokens']:,}, {run['masked_tokens']:,.0f}"
            f"{_anew(run)} |"
        )
    return "\n".join(lines)


def scaled_table(found: Mapping[str, Any]) -> str:
    """Returns the table of the runs that were scaled, and a sentence about each; nothing where there are none."""
    runs = [run for run in found["runs"] if "scaled" in run]
    if not runs:
        return ""
    lines = [
        "| bound | engines | step | of the limit | predicted | trained tokens/s | a GPU | generated tokens/s | GPUs busy "
        "| requests that run | trained samples by replica |",
        "|---" * 11 + "|",
    ]
    for run in runs:
        scaled = run["scaled"]
        before, after = scaled["samples_before"], scaled["samples_after"]
        lines.append(_scaled_line(run["bound"], str(found["engines"]), run, before))
        settled = scaled["settled_after_steps"]
        engines = str(scaled["engines"]) + ("" if settled is None else f", after {settled} steps")
        lines.append(_scaled_line(run["bound"], engines, scaled["after"], after))
    return "\n".join(lines) + "\n\n" + "\n\n".join(_joined(run) for run in runs)


def _scaled_line(bound: int, engines: str, figures: Mapping[str, Any], samples: Mapping[str, int]) -> str:
    if "step_seconds" not in figures:
        return f"| {bound} | {engines} | {figures.get('problem', '')} |" + " |" * 8
    return (
        f"| {bound} | {engines} | {figures['step_seconds']:.2f} s | {_share(figures.get('of_limit'))} "
        f"| {_seconds(figures.get('predicted_seconds'))} | {figures['trained_tokens_per_s']:,.0f} "
        f"| {figures['trained_tokens_per_s_per_gpu']:,.0f} | {figures['generated_tokens_per_s']:,.0f} "
        f"| {', '.join(_share(busy) for busy in figures.get('gpu_busy', [])) or '—'} | {_number(figures.get('running_requests'))} "
        f"| {', '.join(f'{replica} {count:,}' for replica, count in samples.items()) or '—'} |"
    )


def _joined(run: Mapping[str, Any]) -> str:
    """Returns how replicas joined a run, in sentences."""
    scaled, parts = run["scaled"], []
    for joiner in scaled["joiners"]:
        if joiner["serves_after_s"] is None:
            parts.append(f"{joiner['instance']} did not come to serve.")
            continue
        took = "" if joiner["weights_seconds"] is None else f" in {joiner['weights_seconds']:.1f} s"
        origin = "a push" if joiner["weights_from"] == "push" else joiner["weights_from"]
        served = f"served {joiner['serves_after_s']:.1f} s after its start, version {joiner['version']}"
        parts.append(f"{joiner['instance']} {served}, which it had from {origin}{took}.")
    longest, before = scaled["joining"]["longest_step"], scaled["longest_step_before"]
    parts.append(f"The longest step meanwhile took {_seconds(longest)}, before {_seconds(before)}.")
    if "audit" in run:
        parts.append(f"The audit of the whole run: {'ok' if run['audit']['ok'] else 'not ok'}.")
    return f"Bound {run['bound']}: " + " ".join(parts)


def alone(found: Mapping[str, Any]) -> str:
    """Returns the sentence about engine and trainer alone."""
    if "split" not in found:
        return ""
    best = max(found["alone"], key=lambda one: one["tokens_per_s"])
    share = found["split"]
    return (
        f"Alone, the engine generates {best['tokens_per_s']:,.0f} tokens a second with {best['running']:.0f} requests running: "
        f"g = {share['generation_seconds']:.2f} s a step{_shared_by(found)}; training takes h = {share['training_seconds']:.2f} s. "
        f"Limit {share['limit_seconds']:.2f} s a step{_lent(found)}, U_sync = {share['synchronous_use']:.2f}."
    )


def _lent(found: Mapping[str, Any]) -> str:
    """Returns what the limit would be if each GPU always did whatever there is to do."""
    if found["gpus"] < 2 or found["colocate"]:
        return ""
    share, engines = found["split"], found.get("engines", 1)
    lent = (engines * share["generation_seconds"] + share["training_seconds"]) / found["gpus"]
    return f" ({lent:.2f} s if idle GPUs were lent to the other side)"


def _shared_by(found: Mapping[str, Any]) -> str:
    engines = found.get("engines", 1)
    return f" of {engines} such engines" if engines > 1 and found["gpus"] > 1 else ""


def write_page(measurements: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> None:
    """Puts tables and sentences into the page."""
    parts = []
    for found in [measurements] if isinstance(measurements, Mapping) else measurements:
        work = f"{found['shape']}, {found['lengths']}, cap {found['cap']}, {found['batch']} x {found['samples']} samples a step"
        what = f"{work}, {found['gpus']} GPU"
        plural, shared = "s" if found["gpus"] > 1 else "", ", colocated" if found["colocate"] else ""
        machine = f", of {found['gpu']}" if found.get("gpu") else ""
        texts = (f"**{what}{plural}{shared}{machine}**", table(found), scaled_table(found), alone(found))
        parts.append("\n\n".join(text for text in texts if text))
    put_table(PAGE, "end_to_end", "\n\n".join(parts))


def _bound(run: Mapping[str, Any]) -> str:
    return str(run["bound"]) if run.get("order", "completion") == "completion" else f"{run['bound']}, {run['order']}"


def _anew(run: Mapping[str, Any]) -> str:
    return f"; {run['anew_tokens']:,} generated anew" if run.get("anew_tokens") else ""


def _share(value: float | None) -> str:
    return "—" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f} s"


def _number(value: float | None, digits: int = 0) -> str:
    return "—" if value is None else f"{value:.{digits}f}"
