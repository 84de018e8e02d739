"""``alignment = "bitwise"``: what an engine sampled and what the trainer computes for it are the same bits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.service_process import ROOT
from tests.unit.trainer.megatron.tiny import make_checkpoint


def figures(directory: Path, kind: str, *words: str) -> list[dict[str, Any]]:
    """What the benchmark says, for a model of odd widths whose engine decodes several sequences at once."""
    make_checkpoint(kind, directory / "model")
    command = [sys.executable, "-m", "benchmarks.alignment", "--model", str(directory / "model"), "--steps", "1", "--tokens", "70"]
    done = subprocess.run([*command, "--out", str(directory / "found.json"), *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads((directory / "found.json").read_text())["rows"]
    return rows


@pytest.mark.extra(each=True)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind, backend", [("qwen3", "megatron"), ("qwen2", "torch")])
def test_nothing_differs(tmp_path: Path, kind: str, backend: str) -> None:
    words = ("--backend", backend, "--cases", "off", "bitwise")
    plain, bitwise = figures(tmp_path, kind, *words)
    assert bitwise["tokens"] == plain["tokens"] == 8 * 70
    assert plain["differing"] > 0  # or this test could not fail
    assert (bitwise["differing"], bitwise["max"], bitwise["k3"]) == (0, 0.0, 0.0)
