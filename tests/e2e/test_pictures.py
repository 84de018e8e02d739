"""The example whose model learns to see."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launched import ROOT, LaunchedRun

RUN_SECONDS = 900


@pytest.mark.timeout(RUN_SECONDS + 300)
def test_a_tiny_model_learns_the_colour_of_a_square(tmp_path: Path) -> None:
    """Every push reaches the tower that sees: the engine's log-probs stay the trainer's to the end."""
    data = tmp_path / "data"
    subprocess.run([sys.executable, "examples/colours/prepare.py", str(data)], cwd=ROOT, check=True, timeout=300)
    text = (ROOT / "examples/colours/colours.toml").read_text().replace("runs/colours/data", str(data))
    text = text.replace('name = "colours"', f'name = "colours"\ndir = "{tmp_path / "runs"}"')
    (tmp_path / "colours.toml").write_text(text.replace("num_rollout = 40", "num_rollout = 24"))
    root = tmp_path / "runs" / "colours"
    with LaunchedRun(tmp_path / "colours.toml", root, "colours") as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert summary["audit"] == "ok" and summary["steps"] == 24
    assert summary["mean_abs_logprob_diff"] < 1e-4
    assert summary["reward_last"] > summary["reward_first"] + 0.15 and summary["accuracy_after"] > summary["accuracy_before"]
