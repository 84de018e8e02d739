"""Writes the tables of ``docs/metrics.md`` from the declarations of the code: ``python -m docs.metrics_page [--check]``.

A table stands between ``<!-- metrics: NAME -->`` and ``<!-- /metrics -->``; what is around it is written by hand. NAME is what the table's
metrics begin with (``train/``), or the service that sets them. Declarations are read from the source, so that no package that only a
service has must be installed.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

from docs.catalogue import settle
from shared.runtime.telemetry import MetricSpec, metric_specs

PAGE = Path(__file__).with_name("metrics.md")
ROOT = Path(__file__).resolve().parents[1]
EVERY = "every service"
TOTAL = "_total"
"""The end of a counter's name for Prometheus."""

_TABLE = re.compile(r"(<!-- metrics: ([^\n]+?) -->\n).*?(<!-- /metrics -->)", re.DOTALL)


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.metrics_page", description="the tables of docs/metrics.md from the code")
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 where the page is out of date")
    check, tables, text = parser.parse_args().check, declared_metrics(), PAGE.read_text()
    if problems := misplaced(tables, text):
        print("\n".join(problems), file=sys.stderr)
        return 1
    return settle(PAGE, render(tables, text), check)


def declared_metrics() -> dict[str, list[MetricSpec]]:
    """Returns the declarations of the source by the table that they stand in; the module that has most of a table's comes first."""
    found: dict[str, list[list[MetricSpec]]] = {}
    for path in sorted(path for package in ("services", "shared") for path in (ROOT / package).rglob("*.py")):
        own: dict[str, list[MetricSpec]] = {}
        for spec in (spec for declared in tables_in(path.read_text()) for spec in metric_specs(declared)):
            own.setdefault(table_of(spec, path.relative_to(ROOT)), []).append(spec)
        for table, specs in own.items():
            found.setdefault(table, []).append(specs)
    return {table: [spec for specs in sorted(modules, key=len, reverse=True) for spec in specs] for table, modules in found.items()}


def tables_in(source: str) -> list[str]:
    """Returns the tables that one module declares, in their order."""
    if "declare_metrics(" not in source:
        return []
    calls = [node.value for node in ast.parse(source).body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return [ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "declare_metrics"]


def table_of(spec: MetricSpec, path: Path) -> str:
    """The table of a metric that the module at ``path`` in the repository declares."""
    if "/" in spec.name.partition("<")[0]:
        return spec.name.partition("/")[0] + "/"
    return path.parts[1] if path.parts[0] == "services" else EVERY


def misplaced(tables: dict[str, list[MetricSpec]], text: str) -> list[str]:
    """What keeps the page from being whole: tables that it has no place for, and places without declarations."""
    places = [name for _, name, _ in _TABLE.findall(text)]
    missing = [f"docs/metrics.md has no place <!-- metrics: {name} -->" for name in sorted({*tables} - {*places})]
    empty = [f"docs/metrics.md has a place for metrics of {name}, and no module declares one" for name in sorted({*places} - {*tables})]
    return missing + empty


def render(tables: dict[str, list[MetricSpec]], text: str) -> str:
    """The page ``text`` with its tables made anew."""
    return _TABLE.sub(lambda place: place[1] + _rows(place[2], tables[place[2]]) + place[3], text)


def exported_name(spec: MetricSpec) -> re.Pattern[str]:
    """Matches the names under which Prometheus has what a declaration declares."""
    parts = re.split(r"<[^>]*>", spec.name)
    legal = r"\w+".join(re.sub(r"[^A-Za-z0-9]", "_", part) for part in parts)
    return re.compile(f"myxo_{legal}{TOTAL if spec.counter else ''}")


def _rows(table: str, specs: list[MetricSpec]) -> str:
    of_trainer = table.endswith("/")
    heads = ["metric", "unit", "definition", "when"] if of_trainer else ["metric", "labels", "unit", "definition", "when"]
    if not any(spec.when for spec in specs):
        heads.remove("when")
    if not any(spec.labels for spec in specs) and "labels" in heads:
        heads.remove("labels")
    lines = [heads, ["---"] * len(heads)]
    for spec in specs:
        cells = {
            "metric": f"`{spec.name}{TOTAL if spec.counter else ''}`",
            "labels": ", ".join(f"`{label}`" for label in spec.labels),
            "unit": spec.unit,
            "definition": spec.definition,
            "when": spec.when,
        }
        lines.append([cells[head] for head in heads])
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("  |", " |") + "\n"


if __name__ == "__main__":
    sys.exit(main())
