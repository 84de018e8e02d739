"""Evaluations of whole runs: several sets beside training, evaluating alone, the warm start alone, a run's version after the fact."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launched import ROOT, LaunchedRun

RUN_SECONDS = 900


def without(config: Path, *sections: str) -> Path:
    """Leaves sections out of a config."""
    blocks = config.read_text().split("\n[")
    kept = [block for block in blocks if block.removeprefix("[").split("]")[0].strip() not in sections]
    config.write_text("\n[".join(kept))
    return config


@pytest.mark.timeout(RUN_SECONDS + 120)
def test_a_run_without_steps_evaluates_the_model_as_it_is(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """Without trainer, training prompts and warm start; three sets of different settings, one scored by the user's own function."""
    config, root = without(small_run("eval", steps=0, staleness=1), "sft", "data"), tmp_path / "runs" / "eval"
    heldout = tmp_path / "heldout.jsonl"
    sets = f"""
[[eval.sets]]
name = "short"
path = "{heldout}@[:4]"
max_response_len = 2
n_samples_per_eval_prompt = 4
[[eval.sets]]
name = "long"
path = ["{heldout}@[4:6]", "{heldout}@[6:]"]
temperature = 0.0
min_new_tokens = 5
custom_rm_path = "tests.support.reward_hooks:length"
"""
    config.write_text(config.read_text().replace("[trainer]", f"{sets}[trainer]"))
    with LaunchedRun(config, root, "eval") as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"], summary["finished"]) == ("ok", 0, True)
    evaluations: Any = summary["evaluations"]
    assert not (root / "checkpoints").exists()
    found = {one["dataset"]: one for one in evaluations}
    assert {name: (one["version"], one["newest"], one["prompts"], one["samples"]) for name, one in found.items()} == {
        "heldout": (0, 0, 8, 8),
        "short": (0, 0, 4, 16),
        "long": (0, 0, 4, 4),
    }
    assert found["short"]["lengths"]["max"] <= 2 and "pass@4" in found["short"]["rates"] and "pass^4" in found["short"]["rates"]
    assert found["long"]["lengths"]["min"] >= 5
    assert found["long"]["mean_reward"] == pytest.approx(mean_length(root, "long"))  # the custom function's reward


def mean_length(root: Path, dataset: str) -> float:
    """The mean length in characters of the responses that a run has kept of a set."""
    command = [sys.executable, "-m", "myxo.main", "samples", "--dir", str(root.parent), root.name, "--dataset", dataset, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    groups = [json.loads(line) for line in done.stdout.splitlines()]
    texts = [sample["response"] for group in groups for sample in group["samples"]]
    return sum(map(len, texts)) / len(texts)


@pytest.mark.timeout(RUN_SECONDS + 120)
def test_the_warm_start_alone_needs_a_trainer_alone(small_run: Callable[..., Path], tmp_path: Path) -> None:
    config, root = without(small_run("sft", steps=0, staleness=1), "eval", "data"), tmp_path / "runs" / "sft"
    with LaunchedRun(config, root, "sft") as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
    assert (root / "hf" / "model.safetensors").is_file() and (root / "checkpoints").is_dir()
    assert not (root / "nats").exists()
    with LaunchedRun(config, root, "sft") as again:  # nothing is trained twice
        assert again.wait(RUN_SECONDS) == 0, again.said()
