"""Checks the commands in the documentation: every ``make`` target, ``myxo`` command and ``python -m`` module in it exists.

``python -m docs.commands``; exits 1 and lists what does not. Files and directories that a command names must be there too, unless they lie
under ``runs/`` (a run makes them).
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("examples/**/README.md")),
]

_BLOCK = re.compile(r"```(?:bash|sh|console)\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`((?:make|myxo|python -m|\.venv/bin/\w+)[^`]*)`")
_PATH = re.compile(r"(?<![\w/.-])((?:examples|docs|tests|services|shared|deploy|benchmarks|configs)/[\w./-]+)")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")

_OWN = ("benchmarks", "docs", "examples", "myxo", "services", "shared", "tests")


def main() -> int:
    """The command line. Returns the exit code."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    show_help = [sys.executable, "-m", "myxo.main", "--help"]
    help_text = subprocess.run(show_help, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    problems, checked = [], 0
    for page in PAGES:
        text = page.read_text()
        lines = [line.split("#")[0].strip() for block in _BLOCK.findall(text) for line in block.splitlines()] + _INLINE.findall(text)
        for line in filter(None, lines):
            checked += 1
            problems += [f"{page.relative_to(ROOT)}: `{line}`: {problem}" for problem in _problems(line, targets, help_text)]
        for path in _LINK.findall(text):
            if not (page.parent / path).exists():
                problems.append(f"{page.relative_to(ROOT)}: link to {path}, which is not there")
    print("\n".join(problems) or f"{checked} commands on {len(PAGES)} pages are there")
    return 1 if problems else 0


def _problems(line: str, targets: set[str], help_text: str) -> list[str]:
    found = []
    words = [word for word in line.split() if "=" not in word or word.startswith("-")]
    program = Path(words[0]).name if words else ""
    if program == "make" and len(words) > 1 and words[1] not in targets:
        found.append(f"the Makefile has no target {words[1]}")
    if program == "myxo" and len(words) > 1:
        found += [f"myxo has no command {name}" for name in words[1].split("|") if not name.startswith("-") and name not in help_text]
    words = [re.sub(r"^myxo\.(?=shared\.|services\.)", "", word) for word in words]  # as a wheel has them
    # of a package that is not ours only itself is looked for: to look inside would import it
    module = words[2] if len(words) > 2 and words[2].split(".")[0] in _OWN else " ".join(words[2:3]).split(".")[0]
    if program.startswith("python") and words[1:2] == ["-m"] and module and importlib.util.find_spec(module) is None:
        found.append(f"there is no module {words[2]}")
    found += [f"{path} is not there" for path in _PATH.findall(line) if not (ROOT / path).exists()]
    return found


if __name__ == "__main__":
    sys.exit(main())
