"""The quick start with nothing but PyPI to install from, where torch is the build for CUDA. Takes 12 GB of disk while it runs."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import first_curve

ROOT = Path(__file__).resolve().parents[2]
NOT_CLONED = shutil.ignore_patterns(".venv", "runs", "build", ".git", ".*_cache", "__pycache__", "*.egg-info", ".hypothesis")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_FIND", "PIP_INDEX", "PIP_EXTRA", "TORCH_"))}

pytestmark = [pytest.mark.extra, pytest.mark.timeout(3600)]


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A copy of this checkout without an environment, taken away with the one that is made there."""
    path = tmp_path / "clone"
    shutil.copytree(ROOT, path, ignore=NOT_CLONED)
    yield path
    shutil.rmtree(path)


def run(clone: Path, *command: str) -> str:
    """What the command prints in the clone, with a pip that knows no index but its own."""
    environment = ENVIRONMENT | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def test_the_quick_start_runs_with_torch_for_cuda(clone: Path) -> None:
    said = run(clone, "make", "quickstart")
    assert "Downloading torch-2.13.0-" in said
    assert run(clone, ".venv/bin/python", "-c", "import torch; print(torch.version.cuda)").strip() != "None"
    summary = json.loads((clone / "runs" / "quickstart" / "summary.json").read_text())
    assert (summary["finished"], summary["audit"]) == (True, "ok")
    assert summary["accuracy_after"] > summary["accuracy_before"]
    launcher = ("tests/integration/engine/test_command.py", "-k", "torchvision or operators or stand_ins")
    run(clone, ".venv/bin/python", "-m", "pytest", *launcher)


def test_the_wheel_runs_the_quick_start() -> None:
    figures = first_curve.measure(sys.executable, ["--num-rollout", "30"], ordinary=True)
    assert (figures["steps"], figures["finished"], figures["audit"]) == (30, True, "ok")
    assert figures["accuracy_after"] > figures["accuracy_before"]
    reached = figures["seconds"]
    assert 0 < reached["install"] < reached["prepared"] < reached["curve"] < reached["end"]
