"""What the colocated benchmark reads: the GPU that the run has, and a run's figures while it continues."""

import sys
from pathlib import Path

import pytest

from benchmarks import colocate
from tests.support.tables import table


@table(("told", "place"), [(None, 0), ("", 0), ("0", 0), ("3", 3), (" 2, 0", 2), ("GPU-5c1f", "GPU-5c1f"), ("MIG-7,GPU-5c1f", "MIG-7")])
def test_the_first_visible_gpu_is_read(told: str | None, place: int | str) -> None:
    assert colocate.first_visible(told) == place


def test_figures_are_told_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocate, "TOLD_SECONDS", 0.05)
    monkeypatch.setattr(colocate, "of_shape", lambda case, data: [])
    monkeypatch.setattr(colocate, "launch", lambda words: [sys.executable, "-c", "input()"])  # ends by itself: it has no input
    rows = list(colocate.run("tiny", "cpu", tmp_path, 60, []))
    assert rows[-1]["exit"] == 1 and all(row["exit"] is None for row in rows[:-1])
    monkeypatch.setattr(colocate, "launch", lambda words: [sys.executable, "-c", "import time; time.sleep(600)"])
    *before, last = colocate.run("tiny", "cpu", tmp_path, 0.3, [])
    assert before and before[0]["exit"] is None and before[0]["turns"] == 0
    assert last["exit"] == -15, "its time was over"
