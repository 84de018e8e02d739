"""The benchmark of whole runs in layouts of several GPUs, on a CPU: its runs end well, and what it says of them is so."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.service_process import ROOT

SECONDS = 900


@pytest.mark.extra
@pytest.mark.timeout(3 * SECONDS)
def test_adapters_and_deaths_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ["--case", "lora", "death", "--device", "cpu", "--steps", "3", "--kills", "1", "--seconds", str(SECONDS)]
    command = [sys.executable, "-m", "benchmarks.gpu_runs", *words, "--directory", str(tmp_path), "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2.8 * SECONDS)
    assert file.exists(), done.stderr
    rows: dict[str, dict[str, Any]] = {row["case"]: row for row in json.loads(file.read_text())["cases"]}
    adapters, died = rows["lora"], rows["death"]
    assert (adapters["exit"], adapters["steps"], adapters["audit"], adapters["problems"]) == (0, 3, "ok", []), done.stderr
    assert adapters["pushes"]["bytes"] == adapters["adapter_bytes"] > 0
    # which of the trainer's push and the peer comes first is a race, and so is whether a push of 1 MB outlives the kill
    races = {"nobody took its weights from a peer", "no death was inside a push: each had ended well"}
    assert (died["exit"], died["audit"], set(died["problems"]) - races) == (130, "ok", set()), done.stderr
    [death] = died["deaths"]
    assert death["back_after"] > 0 and death["source"] in ("peer", "trainer") and death["named_by"]
    assert done.returncode == any(row["problems"] for row in rows.values())
    assert "| lora: trainer 1, engine 1; adapters alone are pushed | 3 |" in done.stdout
