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


@pytest.mark.extra  # the run of `myxo eval`, below, is one without steps as well
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
    lengths = [len(text) for [text] in kept(root, "long", 0).values()]
    assert found["long"]["mean_reward"] == pytest.approx(sum(lengths) / 4)  # the custom function's reward


def kept(root: Path, dataset: str, version: int) -> dict[str, list[str]]:
    """The responses that a run has kept of a set under a version: row of the set → texts."""
    words = ["samples", "--dir", str(root.parent), root.name, "--dataset", dataset, "--version", str(version), "--json"]
    done = subprocess.run([sys.executable, "-m", "myxo.main", *words], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    groups = [json.loads(line) for line in done.stdout.splitlines()]
    return {group["group"].rpartition(".")[2]: [sample["text"] for sample in group["samples"]] for group in groups}


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 120)
def test_the_warm_start_alone_needs_a_trainer_alone(small_run: Callable[..., Path], tmp_path: Path) -> None:
    config, root = without(small_run("sft", steps=0, staleness=1), "eval", "data"), tmp_path / "runs" / "sft"
    with LaunchedRun(config, root, "sft") as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
    assert (root / "hf" / "model.safetensors").is_file() and (root / "checkpoints").is_dir()
    assert not (root / "nats").exists()
    with LaunchedRun(config, root, "sft") as again:  # nothing is trained twice
        assert again.wait(RUN_SECONDS) == 0, again.said()


SETS = """
[[eval.sets]]
name = "greedy"
path = "{heldout}"
temperature = 0.0
max_response_len = 5
[[eval.sets]]
name = "door"
path = "{heldout}"
temperature = 0.0
max_response_len = 5
custom_generate_function_path = "tests.support.generate_hooks:plain_loop"
[[eval.sets]]
name = "several"
path = "{heldout}@[:3]"
temperature = 0.7
top_p = 0.9
n_samples_per_eval_prompt = 4
custom_rm_path = "tests.support.reward_hooks:length"
"""


@pytest.mark.extra(each=True)
@pytest.mark.timeout(2 * RUN_SECONDS + 120)
def test_sets_are_evaluated_beside_training_and_a_version_after_the_fact(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """Greedy figures are those of a plain loop over the served engine's HTTP door, in the run and of the same version afterwards."""
    config, root = without(small_run("sets", steps=2, staleness=1), "eval"), tmp_path / "runs" / "sets"
    heldout = tmp_path / "heldout.jsonl"
    settings = f"[eval]\neval_interval = 1\neval_max_response_len = 4\n{SETS.format(heldout=heldout)}[trainer]"
    config.write_text(config.read_text().replace("[trainer]", settings))
    with LaunchedRun(config, root, "sets") as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    found: dict[tuple[str, int], Any] = {(one["dataset"], one["version"]): one for one in summary["evaluations"]}
    assert set(found) == {(name, version) for name in ("greedy", "door", "several") for version in (0, 1, 2)}
    assert {(one["prompts"], one["samples"], one["late"], one["failed"]) for one in found.values()} == {(8, 8, 0, 0), (3, 12, 0, 0)}
    assert all(one["version"] <= one["newest"] and one["lag"] >= 0 for one in found.values())
    assert set(found["several", 2]["rates"]) == {f"pass{sign}{k}" for sign in "@^" for k in (1, 2, 4)}
    assert found["several", 2]["lengths"]["max"] <= 4
    lengths = [len(text) for texts in kept(root, "several", 2).values() for text in texts]
    assert found["several", 2]["mean_reward"] == pytest.approx(sum(lengths) / 12)  # by the set's own function
    greedy, door = found["greedy", 2], found["door", 2]
    assert (greedy["newest"], greedy["lag"]) == (door["newest"], door["lag"]) == (2, 0)  # no push follows the last version
    for figure in ("mean_reward", "lengths", "truncated", "rates"):
        assert greedy[figure] == door[figure], figure
    assert kept(root, "greedy", 2) == kept(root, "door", 2) and len(kept(root, "greedy", 2)) == 8

    after = evaluated(root, "--version", "2")
    again = {one["dataset"]: one for one in after["evaluations"]}
    assert after["version"] == 2 and {name: one["samples"] for name, one in again.items()} == {"greedy": 8, "door": 8, "several": 12}
    for figure in ("mean_reward", "lengths", "truncated", "rates"):
        assert again["greedy"][figure] == greedy[figure], figure
    assert kept(root.with_name("sets-eval-v2"), "greedy", 0) == kept(root, "greedy", 2)


def evaluated(root: Path, *words: str) -> dict[str, Any]:
    """`myxo eval` of a run; returns what it has written."""
    command = [sys.executable, "-m", "myxo.main", "eval", root.name, "--dir", str(root.parent), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (root / "evaluations").glob("*.json")
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures
