"""Traces of chosen steps, by part; records of allocations."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from myxo.preflight import machine_checks
from myxo.preflight.inspection import Inspection
from services.trainer.step_profiler import StepProfiler
from shared.config import devices
from shared.config.config_reading import parse
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, values


def trained(directory: Path, steps: range = range(5), **debug: Any) -> list[str]:
    """Six products of matrices in each step: four for log-probs of two policies, two for the actor. Returns the traces' names."""
    config = run_config(directory, debug={"use_pytorch_profiler": True, "profile_step_start": 2, "profile_step_end": 4, **debug})
    profiler, ones = StepProfiler(config, rank=3), torch.ones(2, 2)
    for step in steps:
        profiler.begin(step)
        for of in ("", "_ref"):
            with profiler.part("train_log_probs", of):
                ones = ones @ ones @ ones
        with profiler.part("train_actor"):
            ones = ones @ ones @ ones
        profiler.end()
    profiler.close()
    return sorted(path.name for path in (config.trained / "profile").glob("*")) if (config.trained / "profile").exists() else []


def events(directory: Path, name: str, event: str) -> int:
    """How often a trace holds an event."""
    with gzip.open(directory / "runs" / "test" / "profile" / name) as file:
        return sum(entry.get("name") == event for entry in json.load(file)["traceEvents"])


def test_all_of_the_chosen_steps_is_one_trace_with_its_parts_marked(tmp_path: Path) -> None:
    assert trained(tmp_path) == [name := "train_overall_rank_3_steps_2_to_3.pt.trace.json.gz"]
    assert events(tmp_path, name, "aten::mm") == 2 * 6
    assert [events(tmp_path, name, part) for part in ("train_actor", "train_log_probs", "train_log_probs_ref")] == [2, 2, 2]


def test_parts_have_a_trace_each(tmp_path: Path) -> None:
    names = trained(tmp_path, profile_target=["train_actor", "train_log_probs"])
    assert names == sorted(
        f"{part}_rank_3_step_{step}.pt.trace.json.gz"
        for part in ("train_actor", "train_log_probs", "train_log_probs_ref")
        for step in (2, 3)
    )
    assert {events(tmp_path, name, "aten::mm") for name in names} == {2}


@pytest.mark.parametrize(("steps", "traced"), [(range(3), "steps_2_to_2"), (range(3, 9), "steps_2_to_3")])
def test_a_run_that_ends_or_resumes_among_the_chosen_steps_has_the_rest_of_them(tmp_path: Path, steps: range, traced: str) -> None:
    assert [traced in name for name in trained(tmp_path, steps)] == [True]


def test_nothing_is_traced_that_was_not_asked_for(tmp_path: Path) -> None:
    assert trained(tmp_path, use_pytorch_profiler=False) == []
    assert trained(tmp_path, profile_target=["rollout"]) == []
    assert trained(tmp_path, steps=range(4, 6)) == []


def test_a_disk_that_fails_costs_the_trace_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "test").mkdir(parents=True)
    (tmp_path / "runs" / "test" / "profile").write_text("a file where the directory belongs")
    config = run_config(tmp_path, debug={"use_pytorch_profiler": True, "profile_step_start": 0, "profile_step_end": 1})
    profiler = StepProfiler(config, rank=0)
    profiler.begin(0)
    profiler.end()
    profiler.close()
    assert "profile_not_written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("debug", "field", "says"),
    [
        ({"use_pytorch_profiler": True, "profile_step_start": 12}, "profile_step_end", "after profile_step_start = 12"),
        ({"profile_target": ["train"]}, "profile_target", "train_overall"),
        ({"record_memory_history": True, "memory_recorder": "memray"}, "memory_snapshot_num_steps", "memray"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path: Path, debug: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse(values(tmp_path, debug=debug))
    assert caught.value.field.startswith(f"debug.{field}")


def test_torchs_recorder_needs_cuda_and_that_is_said_before_the_start(tmp_path: Path) -> None:
    config = run_config(tmp_path, trainer={"train_device": "cpu"}, debug={"record_memory_history": True})
    [problem] = machine_checks.check_profilers(Inspection(config))
    assert isinstance(problem, ConfigError) and problem.field == "debug.record_memory_history"
    assert "memory_recorder = memray" in problem.expected
    assert not list(machine_checks.check_profilers(Inspection(run_config(tmp_path, trainer={"train_device": "cpu"}))))


def test_memray_is_asked_for_by_name_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"record_memory_history": True, "memory_recorder": "memray", "memory_snapshot_num_steps": 1}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install memray"):
        devices.check(run_config(tmp_path, debug=memory))


def test_memray_records_so_many_steps(tmp_path: Path) -> None:
    memray = pytest.importorskip("memray")
    memory = {"record_memory_history": True, "memory_recorder": "memray", "memory_snapshot_num_steps": 1}
    config = run_config(tmp_path, debug=memory)
    profiler = StepProfiler(config, rank=0)
    profiler.begin(0)
    kept = bytearray(50_000_000)
    profiler.end()
    profiler.begin(1)
    profiler.end()
    profiler.close()
    reader = memray.FileReader(config.trained / "profile" / "memory_snapshot_rank0_snapshot.memray")
    assert reader.metadata.peak_memory >= len(kept)
