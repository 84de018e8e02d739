"""Measures the code: lines and files of each room, walks, functions, complexity, names that exist twice, circles of imports. ``make size``.

With ``--check`` exits 1 where a bound is broken. Complexity is McCabe's as radon counts it (each boolean operator and comprehension is a
branch); circles are of modules, imports under ``TYPE_CHECKING`` and inside functions among them (grimp). Walks: docs/reading.md.
"""

import argparse
import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp
import networkx
from radon.complexity import cc_visit
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(name for name in ("services", "shared", "myxo") if (ROOT / name).is_dir())

# CONTRIBUTING.md says how these two may move
MOST_LINES = 104939
MOST_FILES = 450
MOST_COMPLEXITY = 15
MEDIAN_FUNCTION = 8  # lines, docstring included

SHOWN = 8


@dataclass(frozen=True)
class Function:
    """A function or method. ``lines``: from ``def`` to its end."""

    place: str
    lines: int
    complexity: int


def sources() -> Iterator[tuple[Path, str]]:
    """Yields every Python file of the packages and its text."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text()


def functions(path: Path, text: str) -> Iterator[Function]:
    """Yields a file's functions and methods, nested ones with what they are in."""
    for block in cc_visit(text):
        if hasattr(block, "methods"):
            continue  # a class; its methods are blocks of their own
        name = f"{block.classname}.{block.name}" if block.is_method else block.name
        yield Function(f"{path}:{block.lineno} {name}", block.endline - block.lineno + 1, block.complexity)


def public_names(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yields (kind and name, file) of the module and its public classes."""
    if path.stem not in ("__init__", "__main__"):
        yield f"module {path.stem}", str(path)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield f"class {node.name}", str(path)


def circles() -> list[list[str]]:
    """Returns the groups of modules that import one another, in one way or another."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False)
    imports = networkx.DiGraph([(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)])
    return [sorted(found) for found in networkx.strongly_connected_components(imports) if len(found) > 1]


def walks() -> list[tuple[str, list[str]]]:
    """Returns docs/reading.md's walks: title, files in their order."""
    sections = (ROOT / "docs" / "reading.md").read_text().split("\n## ")[1:]
    found = [(section.split("\n", 1)[0], re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)) for section in sections]
    return [(title, files) for title, files in found if files]


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    check = parser.parse_args().check
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    found: list[Function] = []
    names: defaultdict[str, set[str]] = defaultdict(set)
    for path, text in sources():
        room = "/".join(path.parts[:-1][:3]) if path.parts[:3] == ("services", "trainer", "megatron") else "/".join(path.parts[:-1][:2])
        rooms[room] += text.count("\n")
        files[room] += 1
        found += functions(path, text)
        for name, place in public_names(path, text):
            names[name].add(place)
    twice = {name: places for name, places in names.items() if len(places) > 1}
    broken = report(rooms, files, found, twice, circles())
    return 1 if broken and check else 0


def report(
    rooms: Counter[str], files: Counter[str], found: list[Function], twice: dict[str, set[str]], rings: list[list[str]]
) -> list[str]:
    """Prints all of it. Returns the bounds that are broken."""
    console, total, broken = Console(width=140, highlight=False), sum(rooms.values()), list[str]()
    table = Table("room", "lines", "files", box=None)
    for room, lines in sorted(rooms.items()):
        table.add_row(room, str(lines), str(files[room]))
    console.print(table)
    for title, stations in walks():
        console.print(f"walk: {title}: {len(stations)} files, {sum((ROOT / path).read_text().count(chr(10)) for path in stations)} lines")
    median = statistics.median(function.lines for function in found)
    complex_ones = sorted((f for f in found if f.complexity > MOST_COMPLEXITY), key=lambda f: -f.complexity)
    for name, value, bound, details in (
        ("lines in all", total, MOST_LINES, []),
        ("files", files.total(), MOST_FILES, []),
        ("median function, lines", median, MEDIAN_FUNCTION, []),
        ("functions over the complexity bound", len(complex_ones), 0, [f"{f.complexity:3} {f.place}" for f in complex_ones]),
        ("public names that exist twice", len(twice), 0, [f"{name}: {', '.join(sorted(at))}" for name, at in sorted(twice.items())]),
        ("circles of imports", len(rings), 0, [" ↔ ".join(ring) for ring in rings]),
    ):
        console.print(f"{name}: {value} (at most {bound})", style="red" if value > bound else "green")
        for line in details:
            console.print(f"  {line}", markup=False)
        broken += [name] if value > bound else []
    console.print("largest functions: " + "; ".join(f"{f.lines} {f.place}" for f in sorted(found, key=lambda f: -f.lines)[:SHOWN]))
    return broken


if __name__ == "__main__":
    sys.exit(main())
