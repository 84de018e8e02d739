"""The benchmark of a run's start, on a CPU: it ends a run that draws tokens, and tells its phases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service_process import ROOT

SECONDS = 600


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_a_start_is_measured_by_phases(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.start_up", "--runs", "1", "--directory", str(tmp_path), "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--seconds", str(SECONDS)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1.9 * SECONDS
    )
    assert done.returncode == 0, done.stderr
    [run] = json.loads(file.read_text())["runs"]
    reached, phases = run["milestones"], run["phases"]
    assert 0 < reached["launcher"] < reached["engine process"] < reached["engine"] < reached["first tokens"] == run["seconds"]
    assert phases["engine: imports"] > 0 < phases["trainer: imports"] and run["caches"] == "empty"
