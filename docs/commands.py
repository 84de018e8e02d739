"""Checks the commands in the documentation: every ``make`` target and ``python -m`` module exists, and ``myxo`` takes each of its commands.

``python -m docs.commands``; exits 1 and lists what does not hold. A command of ``myxo`` is read by the command line's own parser, its flags
by that of the config. Files and directories that a command names must be there too, unless they lie under ``runs/`` (a run makes them).
Commands in bash blocks are run by a test besides (tests/integration/myxo/test_page_commands.py), but for those that
``docs/command_runs.toml`` gives a reason for.
"""

import contextlib
import importlib.util
import io
import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from myxo.main import parse
from shared.config import flags
from shared.runtime.errors import BadInput

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("examples/**/README.md")),
]

RUNS: dict[str, list[dict[str, Any]]] = tomllib.loads(Path(__file__).with_name("command_runs.toml").read_text())
"""What becomes of commands → entries with ``match``; a command that none matches is run as it stands."""

_BLOCK = re.compile(r"```(?:bash|sh|console)\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`((?:make|myxo|python -m|\.venv/bin/\w+)[^`]*)`")
_PATH = re.compile(r"(?<![\w/.-])((?:examples|docs|tests|services|shared|deploy|benchmarks|configs)/[\w./-]+)")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")

_SHELL = (">", "|", "&&", "&", ";")
_PLACEHOLDERS = {"FLAGS": "", "[CONFIG]": "", "[DIR]": "", "[PATTERN]": "", "…": "", "COMMAND": "up", "N": "1"}
"""Words that stand for others → one that they stand for, or nothing."""

_OWN = ("benchmarks", "docs", "examples", "myxo", "services", "shared", "tests")


def main() -> int:
    """The command line. Returns the exit code."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    problems, checked = [], 0
    for page in PAGES:
        text = page.read_text()
        lines = [(line, True) for line in block_commands(text)] + [(line, False) for line in _INLINE.findall(text)]
        for line, whole in lines:
            checked += 1
            found = [*_problems(line, targets), *refused(line, whole)]
            problems += [f"{page.relative_to(ROOT)}: `{line}`: {problem}" for problem in found]
        for path in _LINK.findall(text):
            if not (page.parent / path).exists():
                problems.append(f"{page.relative_to(ROOT)}: link to {path}, which is not there")
    problems += idle_entries()
    print("\n".join(problems) or f"{checked} commands on {len(PAGES)} pages are there; of {_counts()}")
    return 1 if problems else 0


def block_commands(text: str) -> list[str]:
    """Returns the commands of a page's bash blocks, in order: one a line, without comments."""
    lines = [line for block in _BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [command for command in (line.split(" #")[0].strip() for line in lines) if command and not command.startswith("#")]


def entry_of(page: str, command: str) -> tuple[str, dict[str, Any]]:
    """Returns what becomes of a command, ``run`` or a kind of `RUNS`, and the entry that says so. ``page``: its path in the repository."""
    bare = command.replace(".venv/bin/", "")
    for kind, entries in RUNS.items():
        for entry in entries:
            if page in entry.get("pages", [page]) and re.match(entry["match"], bare):
                return kind, entry
    return "run", {}


def idle_entries() -> list[str]:
    """What does not hold of `RUNS`: entries that no command needs, that give no reason, or that name a test that is not there."""
    used = [entry for page in PAGES for line in block_commands(page.read_text()) for entry in [entry_of(_name(page), line)[1]] if entry]
    found = [f"docs/command_runs.toml: {kind}: no command matches {e['match']}" for kind in RUNS for e in RUNS[kind] if e not in used]
    found += [f"docs/command_runs.toml: {e['match']} has no reason" for e in RUNS["not_run"] if not e.get("reason")]
    tests = [test for entries in RUNS.values() for entry in entries for test in [entry.get("test")] if test]
    return found + [f"docs/command_runs.toml: {test} is not there" for test in tests if not (ROOT / test).exists()]


def _counts() -> str:
    kinds = Counter(entry_of(_name(page), line)[0] for page in PAGES for line in block_commands(page.read_text()))
    run = sum(kinds[kind] for kind in ("run", "rewritten", "served"))
    told = (
        f"{kinds.total()} in bash blocks {run} are run in CI, {kinds['trained']} with --dry-run there, {kinds['extra']} in the extra tests"
    )
    return f"{told}, and {kinds['not_run']} are not, each with its reason"


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def refused(line: str, whole: bool) -> list[str]:
    """Returns what ``myxo`` has against a line of shell, where it is a command of its own.

    Args:
        whole: it is one to be typed; else it is named in a sentence, and may leave out what the command needs.
    """
    words = shlex.split(line)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words or Path(words[0]).name != "myxo" or len(words) == 1:
        return []
    end = next((place for place, word in enumerate(words) if word in _SHELL), len(words))
    given = [_PLACEHOLDERS.get(word, word) for word in words[1:end]]
    problems = _taken([word for word in given if word])
    return problems if whole else [problem for problem in problems if "required" not in problem and "expected" not in problem]


def _taken(words: Sequence[str]) -> list[str]:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            parsed = parse(words)
    except SystemExit as end:
        return [" ".join(told.getvalue().split())[-400:]] if end.code else []
    except BadInput as error:
        return [str(error)]
    given = list(getattr(parsed, "flags", []))
    if parsed.command == "train" and given and not given[0].startswith("--"):
        given = given[1:]  # a file, which its flags stand over
    return [str(problem) for problem in flags.read(given).problems]


def _problems(line: str, targets: set[str]) -> list[str]:
    found = []
    words = [word for word in line.split() if "=" not in word or word.startswith("-")]
    program = Path(words[0]).name if words else ""
    if program == "make" and len(words) > 1 and words[1] not in targets:
        found.append(f"the Makefile has no target {words[1]}")
    words = [re.sub(r"^myxo\.(?=shared\.|services\.)", "", word) for word in words]  # as a wheel has them
    # of a package that is not ours only itself is looked for: to look inside would import it
    module = words[2] if len(words) > 2 and words[2].split(".")[0] in _OWN else " ".join(words[2:3]).split(".")[0]
    if program.startswith("python") and words[1:2] == ["-m"] and module and importlib.util.find_spec(module) is None:
        found.append(f"there is no module {words[2]}")
    found += [f"{path} is not there" for path in _PATH.findall(line) if not (ROOT / path).exists()]
    return found


if __name__ == "__main__":
    sys.exit(main())
