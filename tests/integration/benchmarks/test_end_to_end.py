"""The benchmarks of whole runs measure what they say, with a real engine and a real trainer on a CPU."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.service_process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def measured(benchmark: str, directory: Path, *words: str, path: Path = ROOT) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """The figures of a benchmark's command, and what it said. ``path``: comes first where its processes look for modules."""
    file = directory / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--device", "cpu", "--json", str(file), *words]
    environment = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100)
    assert file.exists(), done.stderr
    return json.loads(file.read_text()), done


def test_a_run_is_measured_beside_its_engine_alone(tmp_path: Path) -> None:
    load = ["--shape", "tiny", "--lengths", "lognormal:12:0.7", "--cap", "32", "--batch", "2", "--samples", "3"]
    # a replica tells of its tokens every three seconds: a run of a few tiny steps would end between two readings
    short = ["--bounds", "1", "--steps", "30", "--warm-up", "2", "--seconds", "600", "--alone", "4", "--alone-seconds", "2"]
    found, done = measured("end_to_end", tmp_path, *load, *short, "--orders", "fifo")
    [one_by_one, served], [run] = found["alone"], found["runs"]
    assert one_by_one["tokens_per_s"] > 0 < served["tokens_per_s"] and served["way"] == "service", done.stderr
    assert run["steps"] >= 2 and run["step_seconds"] > 0, (run, done.stderr)
    assert run["trained_tokens_per_s"] > 0 < run["generated_tokens_per_s"] and run["staleness_max"] <= 1
    assert 0 < run["logprob_diff"] < 0.01, "engine and trainer have the same weights"
    assert run["of_limit"] > 0 and run["predicted_seconds"] > 0 and found["split"]["limit_seconds"] > 0
    assert f"| 1, fifo | {run['step_seconds']:.2f} s |" in done.stdout
    first = (tmp_path / "figures.json").rename(tmp_path / "first.json")
    taken, _ = measured("end_to_end", tmp_path, *load, "--bounds", "--take", str(first), "--alone")
    assert taken["runs"] == found["runs"]


OLDER = ROOT / "tests/support/older_engine"
"""SGLang that reports the version of a request's end alone, as before 0.5.20."""


@pytest.mark.parametrize(
    ("lengths", "engine"),
    [("geometric:60", OLDER), pytest.param("lognormal:60:1.2", ROOT, marks=pytest.mark.extra)],
    ids=["plain", "function"],
)
def test_under_mask_old_tokens_of_long_responses_leave_the_loss_and_no_group_is_dropped(tmp_path: Path, lengths: str, engine: Path) -> None:
    load = ["--shape", "tiny", "--lengths", lengths, "--cap", "400", "--batch", "2", "--samples", "8", "--bounds", "2", "--alone"]
    flags = ["--steps", "18", "--seconds", "600", "--flags", "--staleness-policy", "mask"]
    found, done = measured("end_to_end", tmp_path, *load, *flags, path=engine)
    [run] = found["runs"]
    assert run["dropped_tokens"] == 0 < run["masked_tokens"] and run["staleness_max"] == 2, (run, done.stderr)
    assert f"| {run['staleness_mean']:.2f}, 2 | 0, {run['masked_tokens']:,.0f} |" in done.stdout


@pytest.mark.extra
def test_a_run_is_measured_before_and_after_a_replica_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARK_MARK", str(tmp_path))  # all that the benchmark starts has it in its environment
    load = ["--shape", "tiny", "--lengths", "geometric:24", "--cap", "64", "--batch", "4", "--steps", "12"]
    found, done = measured("end_to_end", tmp_path, *load, "--bounds", "1", "--scale-to", "2", "--seconds", "600", "--alone")
    [run] = found["runs"]
    scaled = run["scaled"]
    assert done.returncode == 0 and run["audit"]["ok"], (run, done.stderr)
    assert run["steps"] >= 2 and run["step_seconds"] > 0 and scaled["after_steps"] >= 7
    assert set(scaled["samples_before"]) == {"rollout-0"}
    [joiner] = scaled["joiners"]
    assert joiner["serves_after_s"] > 0 and joiner["version"] > 0 and joiner["weights_from"] in ("rollout-0", "disk", "push")
    assert scaled["after"]["steps"] >= 5 and scaled["after"]["trained_tokens_per_s"] > 0
    assert scaled["samples_after"]["rollout-1"] > 0 and scaled["joining"]["longest_step"] > 0
    assert f"| 1 | 2, after {scaled['settled_after_steps']} steps | {scaled['after']['step_seconds']:.2f} s |" in done.stdout
    assert marked(str(tmp_path)) == [], "nothing is left of run and joiner"


def marked(text: str) -> list[str]:
    """The command lines of the processes that were started with this text in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"BENCHMARK_MARK={text}\0".encode() in environment.read_bytes():
                found.append(environment.with_name("cmdline").read_text())
    return found


def test_the_engine_is_driven_directly_and_through_the_service(tmp_path: Path) -> None:
    short = ["--at-once", "8", "--samples", "3", "--seconds", "3", "--warm", "2", "--pairs", "1"]
    found, done = measured("rollout_overhead", tmp_path, *short)
    [pair] = found["pairs"]
    assert pair["ratio"] > 0 and found["ratio"] == pair["ratio"]
    assert 4 < pair["service"]["running"] <= 8 and 4 < pair["direct"]["running"] <= 8
    assert done.returncode == (found["ratio"] < 0.98), done.stderr


@pytest.mark.extra
def test_a_shape_runs_colocated(tmp_path: Path) -> None:
    [row], done = measured("colocate", tmp_path, "--case", "tiny", "--directory", str(tmp_path), "--seconds", "600")
    assert row["exit"] == 0 and row["steps"] == 3 and row["audit"] == "ok", done.stderr
