"""Some seeds of the suite pass: `python -m tests.chaos --seeds 0:1000` has the others, and ``--real`` those with SGLang and Megatron."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process.child_process import with_parent

ROOT = Path(__file__).resolve().parents[2]
JOBS = {"fast": 2, "real": 1}
"""Runs at once: other tests run beside them, and their recoveries have limits."""


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("variant", "seeds"),
    [("fast", "0:2"), pytest.param("real", "0:3", marks=pytest.mark.extra), pytest.param("fast", "2:60", marks=pytest.mark.extra)],
)
def test_seeds(variant: str, seeds: str, tmp_path: Path):
    """Each is a whole run that is disturbed; fast ones are forked from one process that has all modules loaded."""
    first, _, end = seeds.partition(":")
    path = tmp_path / "results.jsonl"
    jobs = JOBS[variant]
    command = [sys.executable, "-m", "tests.chaos", f"--{variant}", "--seeds", seeds, "--jobs", str(jobs), "--json", str(path)]
    ended = subprocess.run(with_parent(command), cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(result["seed"] for result in results) == list(range(int(first), int(end)))
    assert sum(fault["reached"] > 0 for result in results for fault in result["faults"]) >= len(results)
