"""The benchmarks of samples' paths, sandboxes, a worker pool and deltas at their smallest: they measure what they say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import weight_delta
from benchmarks.sandbox import GROUP, checks_per_second, starts, table
from benchmarks.worker_pool import DEADLINE_S, ENDLESS, QUICK, calls_per_second, ours
from benchmarks.worker_pool import table as table_of_pools
from shared.sandbox.program import SandboxSettings
from tests.support.sandboxes import ready_sandbox

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


async def test_the_figures_of_sandboxes_are_there() -> None:
    ready_sandbox(SandboxSettings()).close()
    found = starts(2)
    assert found["start"]["p50_ms"] > found["program"]["least_ms"] > 0 < found["start_from_pool"]["p50_ms"]
    checks = await checks_per_second(GROUP, 1)
    assert checks > 0
    lines = table(found, 61.7, {"list": 15.9, "threads": 3.0}, 1).splitlines()
    assert lines[-3].startswith("62 checks of three tests a second by 1 workers (at least 50); ")
    assert lines[-1] == "MiB beyond a limit of 128: list 16, threads 3"


async def test_the_figures_of_pools_are_there() -> None:
    async with ours("exact", 1) as score:
        assert await score(QUICK, 60.0) == [1.0, 0.0, 1.0, 0.0] * 2
        assert await calls_per_second(score, QUICK, 20, 4) > 0
    assert DEADLINE_S > 0 and len(ENDLESS[0]) == 1
    row = {"quick_calls_per_s": 1000.4, "math_calls_per_s": 99.6, "late_ms": 40.0, "replaced_ms": 1200.0}
    assert table_of_pools({"ours": row}).splitlines()[-1] == "| ours | 1000 | 100 | 40 ms | 1200 ms |"


@pytest.mark.extra
def test_a_step_of_the_quick_start() -> None:
    (row,) = weight_delta.measure("quickstart", 1)
    assert (row["xor_rebuilt"], row["overwrite_rebuilt"]) == ("bit-equal", "bit-equal")
    assert row["xor_bytes"] < 0.75 * row["full_bytes"] and row["changed"] > 0.9  # float32: all elements move, the leading bytes do not
    assert "| quickstart | float32 | 0.0001 | 1 |" in weight_delta.table([row])
