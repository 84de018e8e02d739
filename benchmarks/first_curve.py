"""Seconds from nothing to the first curve: an empty environment, ``pip install``, ``myxo quickstart``.

``python -m benchmarks.first_curve [--json FILE] [--python PYTHON] [--ordinary] [--write] [-- FLAGS]`` builds the wheel, makes an
environment in a temporary directory, installs the wheel with its extra ``quickstart`` there without pip's cache, and runs
``myxo quickstart`` with FLAGS. With ``--ordinary`` pip knows PyPI alone, where torch is the build for CUDA; else it keeps this machine's
settings. Takes up to 12 GB of disk. ``--write`` puts the table of `RESULT` into docs/packaging.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.command_line import machine, write
from benchmarks.page_table import put_table

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "first_curve.json"
PAGE = ROOT / "docs" / "packaging.md"

COMMAND_SECONDS = 3600.0
"""The deadline of each command."""

SIGNS = {
    "prepared": re.compile(r"is the run's config"),
    "curve": re.compile(r"^step (?!0/|1/)\d+/"),
}
"""Milestones, and what the quick start prints when it has reached them. Two steps make a line."""

ROWS = {
    "install": "`pip install` has ended",
    "prepared": "SGLang is installed, model and problems are made",
    "curve": "two training steps are done: the first curve",
    "end": "the run has ended, with its table and picture",
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the figures there; the repository's are in {RESULT}")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULT into the docs; nothing is measured")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to start from")
    parser.add_argument("--ordinary", action="store_true", help="pip knows PyPI alone")
    parser.add_argument("flags", nargs="*", help="of `myxo quickstart`, after --")
    given = parser.parse_args()
    if given.write:
        put_table(PAGE, "first_curve", table(json.loads(RESULT.read_text())))
        return 0
    figures = measure(given.python, given.flags, ordinary=given.ordinary)
    print(json.dumps(figures, indent=2))
    write(given.json, figures)
    return 0


def measure(python: str, flags: list[str], *, ordinary: bool) -> dict[str, Any]:
    """Returns the seconds from the beginning to each of `ROWS`, and how the run ended. Raises AssertionError with what failed.

    Args:
        python: the interpreter. flags: over the quick start's config. ordinary: pip's settings of this machine do not count.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
    environment["PIP_NO_CACHE_DIR"] = "1"
    if ordinary:
        environment = {name: value for name, value in environment.items() if not name.startswith(("PIP_FIND", "PIP_INDEX", "PIP_EXTRA"))}
        environment["PIP_CONFIG_FILE"] = os.devnull
    with tempfile.TemporaryDirectory(prefix="myxo-first-curve-") as place:
        room = Path(place)
        _run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", place, str(ROOT)], room, environment)
        (wheel,) = room.glob("*.whl")
        began = time.monotonic()
        _run([python, "-m", "venv", str(room / "venv")], room, environment)
        own = str(room / "venv" / "bin" / "python")
        _run([own, "-m", "pip", "install", "--quiet", f"{wheel}[quickstart]"], room, environment)
        reached = {"install": time.monotonic()} | _quickstart([own, "-m", "myxo", "quickstart", "first", *flags], room, environment)
        summary = json.loads((room / "first" / "runs" / "quickstart" / "summary.json").read_text())
        versions = _run([own, "-c", "import sys, torch; print(sys.version.split()[0], torch.__version__)"], room, environment).split()
    kept = ("steps", "finished", "audit", "accuracy_before", "accuracy_after")
    return {
        "machine": machine(),
        **dict(zip(("python", "torch"), versions, strict=True)),
        "index": "PyPI alone" if ordinary else "this machine's",
        "flags": flags,
        "seconds": {name: round(reached[name] - began, 1) for name in ROWS},
        **{name: summary[name] for name in kept},
    }


def _run(command: list[str], room: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=room, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def _quickstart(command: list[str], room: Path, environment: dict[str, str]) -> dict[str, float]:
    """Runs the quick start; returns when it reached what. A run that is over its deadline is stopped, and fails."""
    reached, said = dict[str, float](), list[str]()
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=room, env=environment, **pipes) as running:
        deadline = threading.Timer(COMMAND_SECONDS, running.terminate)
        deadline.start()
        try:
            for line in running.stdout or ():
                said.append(line)
                for name, sign in SIGNS.items():
                    if name not in reached and sign.search(line):
                        reached[name] = time.monotonic()
            code = running.wait(COMMAND_SECONDS)
        finally:
            deadline.cancel()
    assert code == 0 and reached.keys() == SIGNS.keys(), f"ended with {code}: {''.join(said)[-4000:]}"
    return reached | {"end": time.monotonic()}


def table(figures: dict[str, Any]) -> str:
    """Returns the figures as a table and what they were measured on."""
    lines = ["| since the beginning | minutes |", "|---|---|"]
    lines += [f"| {words} | {figures['seconds'][name] / 60:.1f} |" for name, words in ROWS.items()]
    flags = f"`{' '.join(figures['flags'])}`" if figures["flags"] else "no flags"
    where = f"{figures['machine']}; Python {figures['python']}, torch {figures['torch']} from {figures['index']}; {flags}"
    ended = f"held-out accuracy {figures['accuracy_before']:.2f} → {figures['accuracy_after']:.2f}, audit {figures['audit']}"
    return "\n".join([*lines, "", f"{where}. {figures['steps']} steps, {ended}."])


if __name__ == "__main__":
    sys.exit(main())
