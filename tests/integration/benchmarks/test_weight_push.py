"""The benchmark of pushes runs on CPUs as it would on four GPUs: two trainer ranks, one engine or two, the real services between them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SECONDS = 600


def measured(layout: str, figures: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.weight_push", "--device", "cpu", "--gpus", "4", "--layout", layout]
    command += ["--rounds", "1", "--pushes", "3", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = json.loads(figures.read_text())
    assert f"| 4 | {row['layout']} | {row['bytes'] / 1e9:.2f} |" in done.stdout
    assert 0 < row["engine_seconds"] < row["seconds"] < row["push_seconds"] and "not_measured" not in row
    return dict(row)


@pytest.mark.extra
@pytest.mark.timeout(SECONDS + 60)
def test_two_ranks_push_to_two_engines_of_which_one_dies(tmp_path: Path) -> None:
    """In the midst of a push; then it takes what the other has."""
    row = measured("tp2", tmp_path / "figures.json")
    assert (row["gpus"], row["layout"], row["bytes"]) == (4, "TP2, 2 engines", 3_673_600)
    death = row["death"]
    assert death["failure"].startswith("receive: ") and death["peer_bytes"] == row["bytes"] == row["after a death"]["bytes"]
    assert 0 < death["named"] <= death["served"] < death["joined"] and death["engine_up"] <= death["joined"]


@pytest.mark.extra
@pytest.mark.timeout(SECONDS + 60)
def test_two_stages_push_to_an_engine_of_two_ranks(tmp_path: Path) -> None:
    row = measured("pp2", tmp_path / "figures.json")
    assert (row["layout"], row["bytes"]) == ("PP2, 1 engine of TP2", 3_673_600) and "death" not in row
