"""The benchmarks of whole runs' starts, of layouts of several GPUs and of pushes, on CPUs: their runs end well and tell what is so."""

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


START_SECONDS = 600


@pytest.mark.slow
@pytest.mark.timeout(2 * START_SECONDS)
def test_a_start_is_measured_by_phases(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.start_up", "--runs", "1", "--directory", str(tmp_path), "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--seconds", str(START_SECONDS)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1.9 * START_SECONDS
    )
    assert done.returncode == 0, done.stderr
    [run] = json.loads(file.read_text())["runs"]
    reached, phases = run["milestones"], run["phases"]
    assert 0 < reached["launcher"] < reached["engine process"] < reached["engine"] < reached["first tokens"] == run["seconds"]
    assert phases["engine: imports"] > 0 < phases["trainer: imports"] and run["caches"] == "empty"


PUSH_SECONDS = 600


def measured(layout: str, figures: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.weight_push", "--device", "cpu", "--gpus", "4", "--layout", layout]
    command += ["--rounds", "1", "--pushes", "3", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PUSH_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = json.loads(figures.read_text())
    assert f"| 4 | {row['layout']} | {row['bytes'] / 1e9:.2f} |" in done.stdout
    assert 0 < row["engine_seconds"] < row["seconds"] < row["push_seconds"] and "not_measured" not in row
    return dict(row)


@pytest.mark.extra
@pytest.mark.timeout(PUSH_SECONDS + 60)
def test_two_ranks_push_to_two_engines_of_which_one_dies(tmp_path: Path) -> None:
    """In the midst of a push; then it takes what the other has."""
    row = measured("tp2", tmp_path / "figures.json")
    assert (row["gpus"], row["layout"], row["bytes"]) == (4, "TP2, 2 engines", 3_673_600)
    death = row["death"]
    assert death["failure"].startswith("receive: ") and death["peer_bytes"] == row["bytes"] == row["after a death"]["bytes"]
    assert 0 < death["named"] <= death["served"] < death["joined"] and death["engine_up"] <= death["joined"]


@pytest.mark.extra
@pytest.mark.timeout(PUSH_SECONDS + 60)
def test_two_stages_push_to_an_engine_of_two_ranks(tmp_path: Path) -> None:
    row = measured("pp2", tmp_path / "figures.json")
    assert (row["layout"], row["bytes"]) == ("PP2, 1 engine of TP2", 3_673_600) and "death" not in row
