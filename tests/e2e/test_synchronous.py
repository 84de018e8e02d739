"""max_staleness = 0: a synchronous run, the same first batch each time."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from shared.bus import streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.process.embedded_servers import EmbeddedNats
from shared.schema.ledger import BatchFormed, GroupsScored, LedgerRecord
from tests.contract.stored_run import assert_like_any_run
from tests.e2e.launched import ROOT, LaunchedRun
from tests.e2e.traced import assert_traced
from tests.support.otlp_receiver import OtlpReceiver

RUN_SECONDS = 900
GREEDY = ["--rollout-top-k", "1"]
LEARNING_RATE = 1e-4
"""That of `small_run`."""


@pytest.fixture(scope="module", autouse=True)
def forked_python() -> None:
    """Every process of this run is started as a user's is."""


@pytest.mark.extra(each=True)
@pytest.mark.timeout(2 * RUN_SECONDS + 300)
@pytest.mark.parametrize("names", [pytest.param(("sync",), id="once"), pytest.param(("sync-a", "sync-b"), id="twice")])
def test_without_staleness_a_run_is_synchronous_and_repeatable(
    names: tuple[str, ...], small_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on the newest version alone; its replay makes the same weights; a second run with the same seed begins with the same batch.
    What it traces arrives at a real receiver.

    Greedy sampling makes the same samples and rewards of the same groups. (An engine on a CPU has no per-request seed, so tokens that are
    drawn at random may differ from run to run; which prompts they answer may not.)
    """
    first_batches = []
    for name in names:
        config = small_run(name, steps=2, staleness=0)
        root = tmp_path / "runs" / name
        with monkeypatch.context() as traced, OtlpReceiver() as receiver:
            traced.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
            with LaunchedRun(config, root, name, [*GREEDY, *dumping(root)]) as run:
                assert run.wait(RUN_SECONDS) == 0, run.said()
                summary = run.summary()
        assert_traced(receiver, steps=2, groups=2 * 4)
        assert summary["audit"] == "ok"
        assert summary["max_staleness_seen"] == 0
        assert summary["steps"] == 2
        asyncio.run(assert_like_any_run(root, name, steps=2))
        assert root.stat().st_mode & 0o777 == 0o700, "prompts, responses and weights are their owner's alone"
        first_batches.append(asyncio.run(first_batch(root, name)))
    assert all(batch == first_batches[0] for batch in first_batches)
    assert_replayed(config, root)
    assert_replayed_without_log_probs(config, root)


def dumping(root: Path) -> list[str]:
    """Flags for a run that dumps what it trains."""
    return [
        *("--save-debug-rollout-data", str(root / "dumps" / "batch_{rollout_id}.msgpack")),
        *("--save-debug-train-data", str(root / "dumps" / "tensors_{rollout_id}_{rank}.safetensors")),
    ]


def assert_replayed(config: Path, root: Path) -> None:
    """Training on the dumped batches alone makes the very weights that the run ended with, and reports the same losses; and so does
    `myxo replay` on what that run has dumped in slime's format."""
    dumps = root / "dumps"
    alone = [*("--name", f"{root.name}-train"), *("--load-debug-rollout-data", str(dumps / "batch_{rollout_id}.msgpack"))]
    steps = reported("up", str(config), *alone, "--save-debug-rollout-data", str(dumps / "batch_{rollout_id}.pt"))
    assert steps == reported("replay", str(config), str(dumps / "batch_{rollout_id}.pt"))
    assert [step["step"] for step in steps] == [0, 1]
    for again in (root.with_name(f"{root.name}-train"), root.with_name(f"{root.name}-replay")):
        assert (again / "hf" / "model.safetensors").read_bytes() == (root / "hf" / "model.safetensors").read_bytes()
    for step in steps:
        with safe_open(root / "dumps" / f"tensors_{step['step']}_0.safetensors", framework="np") as tensors:
            told = json.loads(tensors.metadata()["myxo"])
            assert told["results"][0]["loss"] == step["loss"]
            assert tensors.get_tensor("0.0.rollout_log_probs").shape == tensors.get_tensor("0.0.tokens").shape


def assert_replayed_without_log_probs(config: Path, root: Path) -> None:
    """Where half of the samples lack the rollout's log-probs, the trainer's own stand in: the weights are the same, but for rounding."""
    dumps, before = root / "dumps", load_file(root / "hf" / "model.safetensors")
    for step in (0, 1):
        content = torch.load(dumps / f"batch_{step}.pt", weights_only=True)
        for sample in content["samples"][::2]:
            sample["rollout_log_probs"] = None
        torch.save(content, dumps / f"bare_{step}.pt")
    steps = reported("replay", str(config), str(dumps / "bare_{rollout_id}.pt"))
    assert [step["step"] for step in steps] == [0, 1]
    assert all("train_rollout_logprob_abs_diff" not in json.dumps(step) for step in steps)
    after = load_file(root.with_name(f"{root.name}-replay") / "hf" / "model.safetensors")
    assert after.keys() == before.keys()
    squares = [np.square(weights.astype(np.float64) - before[name]) for name, weights in after.items()]
    rms = np.sqrt(sum(square.sum() for square in squares) / sum(square.size for square in squares))
    assert rms < 0.02 * LEARNING_RATE, "Adam moves a weight by about as much in each of the steps"


def reported(*words: str) -> list[dict[str, Any]]:
    """The steps that a command reports that trains on dumps, without what they took."""
    done = subprocess.run([sys.executable, "-m", "myxo.main", *words], capture_output=True, text=True, timeout=RUN_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = [line for line in lines if "step" in line]  # those of the warm start are told, too
    timed = ("_time", "_ratio", "_per_s", "_tflops", "_mfu")
    return [{name: value for name, value in step.items() if not name.endswith(timed)} for step in steps]


async def first_batch(root: Path, name: str) -> list[tuple[str, list[float], list[int]]]:
    """(group, rewards, response lengths) of the groups of step 0, from the finished run's ledger."""
    server = EmbeddedNats(root / "nats")
    server.start()
    try:
        bus = await Bus.connect(server.url, "test")
        scored, chosen = {}, None
        async for _, record in streams.read(bus, Subjects(name).ledger_stream, LedgerRecord):
            if isinstance(record, GroupsScored):
                scored |= {group.group: group for group in record.groups}
            if isinstance(record, BatchFormed) and record.step == 0:
                chosen = record.groups
        await bus.close()
    finally:
        server.stop()
    assert chosen is not None
    return [(name, scored[name].rewards, [sample.tokens for sample in scored[name].samples]) for name in chosen]
