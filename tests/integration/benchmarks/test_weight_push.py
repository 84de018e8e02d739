"""The benchmark of pushes runs on CPUs as it would on four GPUs: two trainer ranks, two engines, the real services between them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 600


@pytest.mark.extra
@pytest.mark.timeout(SECONDS + 60)
def test_two_ranks_push_to_two_engines(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.weight_push", "--device", "cpu", "--gpus", "4", "--rounds", "1", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = json.loads(figures.read_text())
    assert (row["gpus"], row["layout"], row["bytes"]) == (4, "TP2, 2 engines", 3_673_600)
    assert 0 < row["engine_seconds"] < row["seconds"] < row["push_seconds"]
    assert f"| 4 | TP2, 2 engines | {row['bytes'] / 1e9:.2f} |" in done.stdout
