"""The benchmark of the sample path at its smallest: it runs, checks what it measures, and tells what it should."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "benchmarks.sample_path"]


def test_the_figures_are_there(tmp_path: Path) -> None:
    told = tmp_path / "figures.json"
    small = ["--no-ray", "--lengths", "300", "--seconds", "0.2", "--repetitions", "2", "--json", str(told)]
    ran = subprocess.run([*COMMAND, *small], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "L = 300" in ran.stdout
    figures = json.loads(told.read_text())
    for name in ("samples_per_s", "raw_samples_per_s", "cpu_s_per_1000", "mb_per_s"):
        assert list(figures[name]) == ["300"]
        assert figures[name]["300"] > 0
    assert set(figures["cpu_s_per_1000_by_process"]["300"]) == {"buffer", "producer", "consumer", "nats", "valkey"}
    assert figures["ray_samples_per_s"] is None
    assert figures["aof"] == "everysec"


def test_a_sample_without_a_response_is_refused() -> None:
    ran = subprocess.run([*COMMAND, "--lengths", "256"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2
    assert "--lengths" in ran.stderr
