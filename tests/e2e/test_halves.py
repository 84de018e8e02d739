"""Halves of a run alone, and a run whose groups all come from outside: what is dumped or handed in is trained as in a whole run."""

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from shared.config.service_sections import KEY_VARIABLE
from shared.data.rollout_files import DIRECTORY
from shared.process.child_process import with_parent
from tests.e2e.launched import ROOT, LaunchedRun
from tests.support.rollout_reader import RolloutReader

RUN_SECONDS = 900


@pytest.mark.extra(each=True)
@pytest.mark.timeout(2 * RUN_SECONDS + 300)
def test_a_run_without_a_trainer_feeds_one_without_engines(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The run without a trainer counts its steps and passes its audit; training reads its dumps, continues, and says which file lacks."""
    config, root = small_run("rolls", steps=3, staleness=1), tmp_path / "runs" / "rolls"
    details = tmp_path / "details"
    profile = [
        "--use-pytorch-profiler",
        "--profile-step-start",
        "0",
        "--profile-step-end",
        "3",
        "--profile-target",
        "rollout",
        "train_actor",
    ]
    rolling = ["--debug-rollout-only", "--dump-details", str(details), "--eval-interval", "1", "--profile-engine-steps", "3"]
    rolling += ["--custom-rm-path", "tests.support.reward_hooks:checksum"]  # right answers alone may be as many in all samples: none
    with LaunchedRun(config, root, "rolls", rolling + profile) as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"], summary["max_staleness_seen"]) == ("ok", 3, 0)
    assert not (root / "hf").exists() and not (details / "train_data").exists()
    assert list((root / "profile" / "rollout-0").glob("*.trace.json.gz")), run.said()
    files = [torch.load(details / "rollout_data" / f"{step}.pt", weights_only=True) for step in range(3)]
    assert [(file["rollout_id"], len(file["samples"])) for file in files] == [(0, 16), (1, 16), (2, 16)]
    assert {version for file in files for sample in file["samples"] for version in sample["weight_versions"]} == {0}

    dumps = ("--load-debug-rollout-data", str(details / "rollout_data" / "{rollout_id}.pt"))
    policies = ("--save-interval", "1", "--save-hf", str(tmp_path / "policies" / "{rollout_id}"))
    first = trained(config, "trains", "--num-rollout", "2", *dumps, *policies, *profile)
    traces = [path.name for path in (tmp_path / "runs" / "trains" / "profile").iterdir()]
    assert sorted(traces) == [f"train_actor_rank_0_step_{step}.pt.trace.json.gz" for step in range(2)]
    assert [step["step"] for step in first] == [0, 1]
    rest = trained(config, "trains", *dumps, *policies, "--lr", "2e-4", "--eps-clip", "0.1")
    log = (tmp_path / "runs" / "trains" / "logs" / "launcher.log").read_text()
    [change] = [line for line in map(json.loads, log.splitlines()) if line["event"] == "values_changed"]
    assert (change["step"], change["changed"]) == (2, ["trainer.lr: 0.0001 → 0.0002", "algorithm.eps_clip: 0.2 → 0.1"])
    assert [step["lr"] for step in first + rest] == pytest.approx([1e-4, 1e-4, 2e-4])
    assert [step["step"] for step in rest] == [2]  # it continues from its checkpoint
    assert [step["reward"] for step in first + rest] == [mean_reward(file) for file in files]
    weights = [(tmp_path / "policies" / str(step) / "model.safetensors").read_bytes() for step in range(3)]
    assert len(set(weights)) == 3
    assert weights[2] == (tmp_path / "runs" / "trains" / "hf" / "model.safetensors").read_bytes()

    refused = up(config, "lacks", "--num-rollout", "4", *dumps)
    assert refused.returncode == 2
    assert "debug.load_debug_rollout_data" in refused.stderr and "rollout_data/3.pt" in refused.stderr


def up(config: Path, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`myxo up` of the same config as another run."""
    command = [sys.executable, "-m", "myxo.main", "up", str(config), "--name", name, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=ROOT)


def trained(config: Path, name: str, *flags: str) -> list[dict[str, Any]]:
    """The steps that a run on dumps reports."""
    done = up(config, name, *flags)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line for line in lines if "step" in line]  # those of the warm start are told, too


def mean_reward(file: dict[str, Any]) -> float:
    rewards = [sample["reward"] for sample in file["samples"]]
    return sum(rewards) / len(rewards)


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS)
def test_demonstrations_alone_are_trained_and_each_step_is_told(tmp_path: Path, tiny_model: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]} for n in range(8)]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    words = f"""
        --hf-checkpoint {tiny_model} --prompt-data {data} --input-key messages --rollout-batch-size 4 --global-batch-size 4 --num-rollout 3
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only --lr 1e-3
        --train-device cpu --train-dtype float32 --save {tmp_path}/saved --run-name sft
    """
    command = [sys.executable, "-m", "myxo.main", "train", *words.split()]
    done = subprocess.run(with_parent(command), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"sft_step"')]
    assert [(step["sft_step"], step["sft_steps"]) for step in told] == [(1, 3), (2, 3), (3, 3)]
    assert told[-1]["sft_loss"] < told[0]["sft_loss"]


KEY = "the key of this test's producer"
SCORES = [0.125, 0.25, 0.5, 0.875]
"""No other reward of the run has these values."""


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_groups_from_outside_alone_are_trained(small_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    steps, root = 3, tmp_path / "runs" / "outside"
    with LaunchedRun(small_run("outside", steps=steps, staleness=1), root, "outside", ["--ingest-groups", "alone"]) as run:
        cards = run.until("a gateway", lambda cards: any(one.service == "gateway" and one.engine for one in cards), RUN_SECONDS)
        produce(next(one.engine for one in cards if one.service == "gateway" and one.engine), run)
        run.ended(steps, RUN_SECONDS)
    records = list(RolloutReader(root / DIRECTORY).records())
    trained = [record for record in records if record.step is not None]
    assert len(trained) == 4 * steps and {tuple(one.reward for one in record.samples) for record in trained} == {tuple(SCORES)}
    assert {record.version for record in records if record.dataset} >= {0, steps}, "held-out prompts are generated here"
    assert not any(record.samples for record in records if record.dataset is None and record.step is None and record.status != "dropped")


def produce(url: str, run: LaunchedRun) -> None:
    """Hands in groups, as there is room for them, until the run ends: one that has become too old is dropped."""
    end = time.monotonic() + RUN_SECONDS
    client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)
    with client, contextlib.suppress(httpx.TransportError):
        for number in itertools.count():
            if run.process.poll() is not None:
                return
            assert time.monotonic() < end, run.said()
            known = client.get("/groups")
            if known.status_code != 200:  # before the first weights, and at the end
                time.sleep(0.2)
                continue
            answer = client.post("/groups", json=group(number, known.json()["version"], known.json()["rollouts"]))
            assert answer.status_code in (200, 409, 410, 429, 503), f"{answer.text}\n{run.said()}"


def group(number: int, version: int, rollouts: int) -> dict[str, object]:
    """A prompt of three tokens and an answer of two."""
    tokens = [[4, 5, 6, 7 + sample, 1] for sample in range(rollouts)]
    columns = {"masks": [[0, 0, 0, 1, 1]] * rollouts, "log_probs": [[0.0, 0.0, 0.0, -4.0, -4.0]] * rollouts}
    return {"id": f"outside-{number}", "tokens": tokens, "versions": version, "scores": SCORES, **columns}
