"""The benchmark of learning: which runs it makes, what it reads of their files, and what it makes of their curves."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from benchmarks.learning import learning_page
from benchmarks.learning.__main__ import LearningFigures
from benchmarks.learning.learning_curves import band, learning_rows, target
from benchmarks.learning.learning_run import LearningRun, curve, environment, planned
from benchmarks.learning.run_fleet import CUT_OFF, FAILED, FINISHED, RUNNING, RunFleet
from shared.config import flags
from shared.config.config_reading import load
from tests.support.tables import table

BEGAN = 1_000_000.0


def test_what_is_cut_off_lacks_seeds_and_no_bound() -> None:
    runs = list(planned("arithmetic", "cpu", [0, 4], 2, ["decoupled", "naive"], 3))
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4
    assert len({run.name for run in runs}) == 8
    assert {(run.bound, run.objective) for run in runs[:4]} == {(0, "decoupled"), (4, "decoupled"), (0, "naive"), (4, "naive")}


@table("example", ["arithmetic", "smollm2"])
@table("device", ["cpu", "cuda"])
def test_commands_are_what_a_run_takes(example: str, device: str) -> None:
    run = LearningRun(example, device, 4, 1, "naive", 7)
    words = run.command(Path("data"), Path("runs"), ["--rollout-batch-size", "2"])
    at = words.index("up")
    config = load(Path(words[at + 1]), flags.parse([word for word in words[at + 2 :] if word != "--fresh"]))
    assert (config.rollout.max_staleness, config.rollout.num_rollout, config.rollout.rollout_batch_size) == (4, 7, 2)
    assert config.algorithm.off_policy == "none" and config.rollout.rollout_device == config.trainer.train_device == device
    assert config.data.rollout_seed != load(Path(words[at + 1])).data.rollout_seed
    assert ("cuda-graph-bs-decode" in config.rollout.sglang) == (device == "cuda")


def test_trainers_and_engines_share_all_gpus_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    visible = [environment(slot, "cuda", 2)["CUDA_VISIBLE_DEVICES"] for slot in range(4)]
    assert visible == ["0,1", "1,0", "0,1", "1,0"]
    assert [environment(slot, "cuda", 4)["CUDA_VISIBLE_DEVICES"] for slot in (0, 3)] == ["0,1", "3,0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert [environment(slot, "cuda", 2)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["2,3", "3,2"]


def line(event: str, seconds: float, **fields: Any) -> str:
    return json.dumps({**fields, "event": event, "timestamp": datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat()}) + "\n"


def write_run(root: Path, steps: int) -> None:
    (root / "logs").mkdir(parents=True)
    pushes = [line("weights_pushed", 10.0 * version, version=version) for version in range(steps + 1)]
    (root / "logs" / "trainer-0.log").write_text("a warning\n" + "".join(pushes))
    done = [line("evaluated", 99, version=version, newest=version + 1, mean_reward=0.1 * version, samples=4) for version in (2, 0)]
    (root / "logs" / "buffer-0.log").write_text("".join(done) + '{"event": "evaluated", "vers')
    writer = SummaryWriter(str(root / "tensorboard"))
    for step in range(steps):
        writer.add_scalar("rollout/raw_reward", 0.25 * step, step, walltime=BEGAN + 10.0 * step + 8)
        writer.add_scalar("rollout/staleness_mean", 1.5, step, walltime=BEGAN + 10.0 * step + 8)
        writer.add_scalar("train/loss", 3.0, step, walltime=BEGAN + 10.0 * step + 8)
    writer.close()


def test_a_run_is_read_while_it_goes_on(tmp_path: Path) -> None:
    assert curve(tmp_path / "not begun") == {"steps": [], "evaluations": []}
    write_run(tmp_path, 3)
    found = curve(tmp_path)
    assert [(step["step"], step["seconds"], step["reward"], step["staleness"]) for step in found["steps"]] == [
        (0, 8.0, 0.0, 1.5),
        (1, 18.0, 0.25, 1.5),
        (2, 28.0, 0.5, 1.5),
    ]
    assert found["evaluations"] == [
        {"version": 0, "newest": 1, "seconds": 0.0, "reward": 0.0, "samples": 4},
        {"version": 2, "newest": 3, "seconds": 20.0, "reward": 0.2, "samples": 4},
    ]


def made(bound: int, seed: int, rewards: list[float], step_seconds: float, objective: str = "decoupled") -> dict[str, Any]:
    """A run with an evaluation each step."""
    ends = [step_seconds * (step + 1) for step in range(len(rewards) - 1)]
    steps = [{"step": step, "seconds": seconds, "reward": 0.5, "staleness": float(bound)} for step, seconds in enumerate(ends)]
    rows = [{"version": k, "newest": k, "seconds": step_seconds * k, "reward": reward, "samples": 4} for k, reward in enumerate(rewards)]
    identity = LearningRun("arithmetic", "cpu", bound, seed, objective, len(rewards) - 1).identity
    return {**identity, "state": FINISHED, "seconds": 9.0, "steps": steps, "evaluations": rows}


def test_bands_go_from_the_least_to_the_most_of_the_seeds() -> None:
    found = band([made(0, 0, [0.0, 0.2, 0.4], 2.0), made(0, 1, [0.0, 0.4, 0.8, 0.9], 2.0)], "steps")
    assert found.x[0] == 0 and found.x[-1] == 2
    assert (found.low[-1], found.mean[-1], found.high[-1]) == pytest.approx((0.4, 0.6, 0.8))
    assert np.all(found.low <= found.mean) and np.all(found.mean <= found.high)


def test_rows_say_what_a_bound_costs_in_steps_and_gains_in_seconds() -> None:
    runs = [made(0, 0, [0.0, 0.4, 0.8], 4.0), made(2, 0, [0.0, 0.2, 0.4, 0.6, 0.8], 1.0), made(8, 0, [0.0, 0.1, 0.1], 1.0)]
    assert target(runs) == pytest.approx(0.6)
    on, two, eight = learning_rows(runs)
    assert (on.bound, two.bound, eight.bound) == (0, 2, 8)
    assert (on.target_steps, two.target_steps) == pytest.approx((1.5, 3.0))
    assert (on.target_seconds, two.target_seconds) == pytest.approx((6.0, 3.0))
    assert eight.target_steps is None and eight.target_seconds is None
    assert on.step_seconds == pytest.approx(4.0) and two.staleness == 2.0
    assert on.end == pytest.approx((0.8, 0.8, 0.8)) and on.over_steps[0] == pytest.approx(0.4)


def test_the_page_gets_a_table_for_each_example_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- learning_arithmetic: python -m benchmarks.learning --write -->\nold\n<!-- /learning_arithmetic -->\nend\n")
    monkeypatch.setattr(learning_page, "PAGE", page)
    monkeypatch.setattr(learning_page, "PICTURE", tmp_path / "picture.png")
    runs = [
        made(bound, seed, [0.0, 0.4, 0.8], 2.0, name) for bound in (0, 4) for seed in (0, 1) for name in ("decoupled", "naive", "torch")
    ]
    learning_page.write(runs, {"arithmetic cpu": {"at": "2026-11-25T16:00:00", "cores": 2}})
    text = page.read_text()
    assert "old" not in text and text.endswith("end\n") and "2 seeds" in text and "2 cores, 2026-11-25." in text
    assert len([row for row in text.splitlines() if row.startswith(("| decoupled", "| naive", "| torch"))]) == 6
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


class Scripted(LearningRun):
    """A run whose command is a script."""

    def command(self, data: Path, directory: Path, flags: Any) -> list[str]:
        script = {0: "pass", 1: "raise SystemExit('no such thing')", 2: "import time; time.sleep(600)"}[self.bound]
        return [sys.executable, "-c", script]


def test_the_fleet_tells_how_runs_end_and_the_file_keeps_what_is_finished(tmp_path: Path) -> None:
    figures = LearningFigures(tmp_path / "figures.json", "cpu")
    runs = [Scripted("arithmetic", "cpu", bound, 0, "naive", 2) for bound in (0, 1, 2)]
    states: dict[int, list[str]] = {0: [], 1: [], 2: []}
    write_run(tmp_path / "runs" / runs[0].name, 2)

    def tell(run: LearningRun, found: dict[str, Any]) -> None:
        states[run.bound].append(found["state"])
        figures.put(run, found)
        if len(states[0]) and states[0][-1] == FINISHED and FAILED in states[1] and states[2]:
            raise KeyboardInterrupt  # as soon as it has told of all: what still runs is then ended

    with pytest.raises(KeyboardInterrupt):
        RunFleet(runs, tell, jobs=3, gpus=0, data=tmp_path, directory=tmp_path / "runs").run(120)
    again = LearningFigures(tmp_path / "figures.json", "cpu")
    assert again.has(runs[0]) and not again.has(runs[1]) and not again.has(runs[2])
    told = {run["bound"]: run for run in again.runs}
    assert told[0]["steps"] == [], "an earlier run's curve is not this one's"
    assert "no such thing" in told[1]["error"]
    assert told[2]["state"] in (RUNNING, CUT_OFF)
