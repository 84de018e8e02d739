"""The suite's figures as a table, and in the page on reliability."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- chaos figures: written by python -m tests.chaos --page -->", "<!-- end of chaos figures -->"

Result = Mapping[str, Any]


def table(results: Sequence[Result]) -> str:
    """Returns a table of Markdown: by kind of fault and process, how often, and the seconds from its end to the next trained step."""
    rows: dict[tuple[str, str], list[float | None]] = {}
    for fault in (fault for result in results for fault in result["faults"] if fault["reached"]):
        for target in fault["targets"]:
            rows.setdefault((fault["kind"], _kind_of(target)), []).append(fault["recovery_s"])
    lines = ["| fault | process | times | next step after, p50 | longest |", "|---|---|---:|---:|---:|"]
    for (kind, target), seconds in sorted(rows.items()):
        known = [found for found in seconds if found is not None]
        figures = [f"{statistics.median(known):.1f} s", f"{max(known):.1f} s"] if known else ["the run was over"] * 2
        lines.append(f"| {kind} | {target} | {len(seconds)} | {figures[0]} | {figures[1]} |")
    return "\n".join(lines)


def write(results: Sequence[Result], page: Path = PAGE) -> None:
    """Puts the table between the page's marks. Raises ValueError where it has none."""
    text = page.read_text()
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{page} lacks the lines {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n{summary(results)}\n\n{table(results)}\n{END}{after}")


def summary(results: Sequence[Result]) -> str:
    """Returns what was run, and how it ended, in a sentence."""
    failed = sum(bool(result["problems"]) for result in results)
    faults = sum(fault["reached"] > 0 for result in results for fault in result["faults"])
    cpu, wall = _total(results, "cpu_s"), _total(results, "seconds")
    each = f"{cpu / len(results):.1f} s of CPU and {wall / len(results):.0f} s each" if results else "none"
    return f"{len(results)} seeds with {faults} faults that hit something, {each}: {failed} failed."


def _total(results: Iterable[Result], name: str) -> float:
    return sum(result[name] for result in results)


def _kind_of(target: str) -> str:
    """Returns a process's kind: its name without its number."""
    head, slash, tail = target.partition("/")
    return head.rstrip("0123456789").rstrip("-") + (f"'s {tail}" if slash else "")
