"""The benchmark of trained draft layers, on a CPU: its run ends well, and what it finds wrong is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.draft_training import problems
from tests.support.service_process import ROOT

SECONDS = 600


def case(*lengths: float, code: int = 0) -> dict[str, Any]:
    return {"exit": code, "accept_length": list(lengths)}


def test_what_is_wrong_is_named() -> None:
    assert problems({"plain": case(), "fixed": case(1.1, 1.1), "trained": case(1.1, 2.0)}) == []
    assert problems({"fixed": case(1.1, 1.1, 1.1), "trained": case(3.0, 1.0, 1.0, 1.0)}) == [
        "trained draft layers are accepted no more often than those that are not trained"
    ]
    assert problems({"plain": case(code=1), "fixed": case()}) == ["plain: exit code 1", "fixed: no accept length"]


@pytest.mark.extra
@pytest.mark.timeout(SECONDS + 120)
def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ["--device", "cpu", "--cases", "trained", "--steps", "2", "--sft-steps", "3", "--seconds", str(SECONDS), "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks.draft_training", *words, "--directory", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=SECONDS + 60
    )
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    report = json.loads(file.read_text())
    found = report["cases"]["trained"]
    assert (report["problems"], found["exit"], found["steps"]) == ([], 0, 2)
    assert len(found["accept_length"]) == len(found["mtp_loss"]) == 2 and min(found["accept_length"]) >= 1.0 and found["tokens_per_s"] > 0
