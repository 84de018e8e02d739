"""The benchmark of trained draft layers, on a CPU: its run ends well, and what it finds wrong is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.draft_training import problems, table
from tests.support.service_process import ROOT

SECONDS = 600


def run(*lengths: float, code: int = 0, cut: bool = False) -> dict[str, Any]:
    return {"exit": code, "cut": cut, "accept_length": list(lengths)}


def test_what_is_wrong_is_named() -> None:
    rising, flat = run(1.1, 1.1, 1.1, 2.0, 2.1, 2.2), run(*[1.1] * 6)
    assert problems({"warm": {"exit": 0, "cut": False}, "trained": rising, "fixed": flat, "compare": {}}) == []
    assert problems({"trained": {**rising, "exit": -15, "cut": True}}) == []
    assert problems({"trained": flat, "fixed": rising}) == [
        "trained draft layers are accepted no more often than they were at first",
        "trained draft layers are accepted no more often than those that are not trained",
    ]
    assert problems({"warm": {"exit": 1, "cut": False}, "fixed": run(1.1, code=2)}) == [
        "warm: exit code 1", "fixed: exit code 2", "fixed: 1 accept lengths, too few"
    ]  # fmt: skip


@pytest.mark.extra
@pytest.mark.timeout(SECONDS + 120)
def test_phases_on_a_cpu(tmp_path: Path) -> None:
    """All phases work, in two calls, and are not done again; so few steps show nothing, and that is the one problem."""
    file = tmp_path / "figures.json"
    short = ["--steps", "6", "--sft-steps", "60", "--seconds", str(SECONDS), "--json", str(file), "--directory", str(tmp_path / "runs")]
    for phases in (["warm", "trained"], []):
        command = [sys.executable, "-m", "benchmarks.draft_training", *phases, "--device", "cpu", *short]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=SECONDS + 60
        )
        assert done.returncode in (0, 1), done.stderr + done.stdout[-2000:]
    report = json.loads(file.read_text())
    phases = report["phases"]
    assert all("accepted no more often" in problem for problem in report["problems"])
    assert [phases[name]["exit"] for name in ("warm", "trained", "fixed")] == [0, 0, 0]
    assert len(phases["trained"]["mtp_loss"]) == len(phases["fixed"]["accept_length"]) == 6 and phases["fixed"]["mtp_loss"] == []
    assert phases["warm"]["loss"][-1] < phases["warm"]["loss"][0] / 5
    compared = phases["compare"]
    assert all(sorted(compared[kind]) == ["1", "8"] for kind in ("plain", "trained", "fixed"))
    assert compared["plain"]["8"]["accept_length"] == 1.0 and table(report).count("|") > 30
