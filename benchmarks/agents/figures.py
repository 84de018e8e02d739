"""The figures as tables for people, and which goals they miss."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from rich.table import Table

PACE = 0.95
"""Tokens per second through a gateway, by token ids, over those of the engine alone: at least so much."""


OVERSUBSCRIBED = 2.0
"""Tokens per second of sessions that do not all fit into an engine, over those of their requests as they come: at least so much."""


def misses(figures: dict[str, Any]) -> list[str]:
    """Returns the goals that are missed, in words."""
    found = []
    if "pace" in figures and (ratio := figures["pace"]["ratio_to_engine"]["gateway, token ids"]) < PACE:
        found.append(f"the gateway's pace by token ids is {ratio:.2f} of the engine's; at least {PACE}")
    if (found_over := figures.get("oversubscribe")) and (ratio := median(found_over["every_ratio"])) < OVERSUBSCRIBED:
        found.append(f"oversubscribed sessions have {ratio:.2f} times the pace of their requests; at least {OVERSUBSCRIBED}")
    if crowd := figures.get("crowd"):
        for name in ("lost", "refused_without_retry_after"):
            if crowd[name]:
                found.append(f"crowd: {name} is {crowd[name]:g}; expected none")
    return found


def tables(figures: dict[str, Any]) -> Iterator[Table]:
    """Yields a table for each part that was measured."""
    parts = {"pace": _pace, "prefixes": _prefixes, "overhead": _overhead, "oversubscribe": _oversubscribe, "crowd": _crowd}
    for name, made in parts.items():
        if name in figures:
            table = made(figures[name])
            table.caption = "; ".join(part for part in (table.caption, figures["machine"], figures["device"], figures["model"]) if part)
            yield table


def _columns(title: str, *names: str) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="right" if table.columns else "left")
    return table


def _pace(found: dict[str, Any]) -> Table:
    table = _columns("Pace", "", "tokens/s", "of the engine", "least … most", "goal")
    for name, pace in found["tokens_per_s"].items():
        ratio = found["ratio_to_engine"].get(name)
        spread = sorted(found["every_ratio"].get(name, []))
        goal = f"≥ {PACE}" if name == "gateway, token ids" else "the limit" if ratio is None else ""
        table.add_row(
            name, f"{pace:,.0f}", "" if ratio is None else f"{ratio:.3f}", f"{spread[0]:.3f} … {spread[-1]:.3f}" if spread else "", goal
        )
    load = found["load"]
    table.caption = f"{load['sessions']} sessions of {load['turns']} turns of {load['drawn']} tokens, {load['opening']} said at first"
    return table


def _prefixes(found: dict[str, Any]) -> Table:
    table = _columns("Prefix cache and affinity", "", "tokens/s", "prompt tokens", "of them computed")
    for name in ("cache and affinity", "cache alone", "affinity alone"):
        row = found[name]
        table.add_row(name, f"{row['tokens_per_s']:,.0f}", f"{row['prompt_tokens']:,}", f"{row['prefill_tokens']:,}")
    table.caption = f"{found['load']['sessions']} sessions over {found['replicas']} replicas"
    return table


def _overhead(found: dict[str, Any]) -> Table:
    table = _columns("What a gateway adds to a request", "", "p50 ms", "p99 ms", "its CPU ms", "the store's", "requests/s")
    for name, rows in found.items():
        for history, row in rows.items():
            shown = [f"{row[key]:,.1f}" for key in ("p50_ms", "p99_ms", "gateway_cpu_ms", "store_cpu_ms", "requests_per_s")]
            table.add_row(f"{name}, {history}", *shown)
    return table


def _oversubscribe(found: dict[str, Any]) -> Table:
    load, spread = found["load"], sorted(found["every_ratio"])
    table = _columns("Sessions that do not all fit", "", "tokens/s", "of the requests", "least … most", "goal")
    table.add_row("requests, as they come", f"{found['tokens_per_s']['requests']:,.0f}", "", "", "the limit without sessions")
    ratio = f"{median(spread):.2f}"
    table.add_row(
        "sessions, by room",
        f"{found['tokens_per_s']['sessions']:,.0f}",
        ratio,
        f"{spread[0]:.2f} … {spread[-1]:.2f}",
        f"≥ {OVERSUBSCRIBED}",
    )
    table.caption = (
        f"{load['sessions']} sessions of {load['turns']} turns of {load['drawn']} tokens, {load['opening']} said at first; one engine that "
        f"keeps {found['kept']:,} tokens"
    )
    return table


def _crowd(found: dict[str, Any]) -> Table:
    table = _columns("A crowd of agents", "", "", "goal")
    goals = {"at_once": "≥ 500", "lost": "0", "refused_without_retry_after": "0"}
    for name in ("sessions", "at_once", "lost", "refused", "refused_without_retry_after", "seconds", "tokens_per_s", "requests_per_s"):
        table.add_row(name.replace("_", " "), f"{found[name]:,g}", goals.get(name, ""))
    table.add_row("MB of the gateways", f"{found['gateway_mb']:,.0f}")
    for name, spent in found["cpu_ms_per_request"].items():
        table.add_row(f"CPU ms of a request: {name}", f"{spent:,.2f}")
    table.caption = f"{found['turns']} turns each, {found['gateways']} gateways, {found['replicas']} replicas"
    return table
