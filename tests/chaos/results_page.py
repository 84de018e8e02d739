"""The suite's figures as tables, and in the page on reliability."""

import re
import statistics
import subprocess
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
SEEDS, SOAK = "chaos figures", "soak figures"
"""The names of the page's parts that are written, each between two marks."""

TITLES = {
    "fast": "With the scripted engine and optimizer step",
    "deterministic": "Synchronous, compared bit by bit with the same run undisturbed",
    "real": "With SGLang and two ranks of Megatron",
}

_SOMEWHERE = re.compile(r"/\S*/(?=runs/)")
"""Where a seed's run lay on the machine that ran it."""

MOST_PROBLEMS = 4
LINE = 140

Result = Mapping[str, Any]


def commit() -> str:
    """Returns the commit of the code that runs, with ``-dirty`` where files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=PAGE.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def joined(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last result of each seed of each variant, by seed. A seed's own words of where its files are do not matter."""
    last = {(result.get("variant", "fast"), result["seed"]): result for result in results}
    return [last[key] for key in sorted(last)]


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
    """Puts the figures of seeds into the page, a table for each variant. Raises ValueError where it lacks the marks."""
    parts = []
    for variant, title in TITLES.items():
        if own := [result for result in results if result.get("variant", "fast") == variant]:
            words = textwrap.fill(f"**{title}**: {summary(own)}", LINE, break_long_words=False)
            parts.append(f"{words}\n\n{table(own)}")
    put(SEEDS, "\n\n".join(parts), page)


def put(name: str, text: str, page: Path = PAGE) -> None:
    """Puts text between the page's marks of a name. Raises ValueError where it has none."""
    begin, end = f"<!-- {name}: written by python -m tests.chaos --page -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{page} lacks the lines {begin!r} and {end!r}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def summary(results: Sequence[Result]) -> str:
    """Returns what was run, of which commits, and how it ended, in sentences."""
    if not results:
        return "no seed was run."
    failed = [result for result in results if result["problems"]]
    faults = sum(fault["reached"] > 0 for result in results for fault in result["faults"])
    cpu, wall = _total(results, "cpu_s") / len(results), _total(results, "seconds") / len(results)
    commits = Counter(result.get("commit", "unknown") for result in results)
    where = ", ".join(f"{name} ({count})" for name, count in commits.most_common())
    text = (
        f"{len(results)} seeds ({_spans([result['seed'] for result in results])}) with {faults} faults that hit something, "
        f"{cpu:.1f} s of CPU and {wall:.0f} s each, at commit {where}: {len(failed)} failed."
    )
    for result in failed[:MOST_PROBLEMS]:
        problem = _SOMEWHERE.sub("", result["problems"][0]).strip()
        text += f" Seed {result['seed']}: {problem[:100]}."
    return text


def _spans(seeds: Iterable[int]) -> str:
    """Returns numbers in words: spans as "0 to 9", with commas between."""
    spans: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if spans and seed == spans[-1][1] + 1:
            spans[-1][1] = seed
        else:
            spans.append([seed, seed])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)


def _total(results: Iterable[Result], name: str) -> float:
    return sum(result[name] for result in results)


def _kind_of(target: str) -> str:
    """Returns a process's kind: its name without its number."""
    head, slash, tail = target.partition("/")
    return head.rstrip("0123456789").rstrip("-") + (f"'s {tail}" if slash else "")
