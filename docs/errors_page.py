"""Writes ``docs/errors.md``, every named error of the code with its meaning and what to do: ``python -m docs.errors_page [--check]``.

The meaning is the class's docstring; what to do in `error_remedies.toml`, which must have a line for each. Classes are
found in the source, so that no package that only a service has must be installed.
"""

import argparse
import ast
import functools
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from docs.catalogue import settle

PAGE = Path(__file__).with_name("errors.md")
ROOT = Path(__file__).resolve().parents[1]
BASE = "MyxoError"

TOP = """# Errors by name

Written by `python -m docs.errors_page` from the code; do not edit. Every error that Myxo raises on purpose is here: commands print its text
in one line, services log it with its name (`myxo logs RUN`), and `myxo status RUN` tells the newest one of each service.
[Troubleshooting](troubleshooting.md) begins with what one sees instead.
"""

WHAT_TO_DO: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("error_remedies.toml").read_text())
"""Heading → error → what a person does about it."""


@dataclass(frozen=True)
class NamedError:
    """An error class. ``meaning``: the first paragraph of its docstring. ``module``: its file in the repository."""

    name: str
    meaning: str
    module: str


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.errors_page", description="docs/errors.md from the errors of the code")
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 where the page is out of date")
    check = parser.parse_args().check
    found = named_errors()
    if problems := incomplete(set(found)):
        print("\n".join(problems), file=sys.stderr)
        return 1
    return settle(PAGE, render(found), check)


def incomplete(found: set[str]) -> list[str]:
    """What keeps the page from being whole: errors without a line, and lines without an error. ``found``: the code's errors."""
    lines = [name for errors in WHAT_TO_DO.values() for name in errors]
    missing = [f"{name}: docs/error_remedies.toml does not say what to do about it" for name in sorted(found - set(lines))]
    return missing + [f"{name}: stands in docs/error_remedies.toml and is no error of the code" for name in sorted(set(lines) - found)]


@functools.cache
def named_errors(packages: tuple[str, ...] = ("services", "shared", "myxo")) -> dict[str, NamedError]:
    """Returns the public errors that derive from the base, by their names; the base itself is none."""
    bases, found = dict[str, list[str]](), dict[str, NamedError]()
    for path in sorted(path for package in packages for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                meaning = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].replace("``", "`").split())
                found[node.name] = NamedError(node.name, meaning, str(path.relative_to(ROOT)))

    def derives(name: str) -> bool:
        return name == BASE or any(derives(base) for base in bases.get(name, []) if base != name)

    return {name: error for name, error in found.items() if derives(name) and name != BASE and not name.startswith("_")}


def render(found: dict[str, NamedError]) -> str:
    """The whole page."""
    lines = [TOP]
    for heading, errors in WHAT_TO_DO.items():
        lines += [f"## {heading}", "", "| error | means | what to do |", "|---|---|---|"]
        lines += [f"| `{name}`<br>{found[name].module} | {found[name].meaning} | {text} |" for name, text in errors.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
