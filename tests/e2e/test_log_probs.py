"""Whole runs whose trainer computes what their engine sampled: over 8-bit or 4-bit weights, from a nucleus, by the engine's experts."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.conftest import write_small_run
from tests.e2e.launched import LaunchedRun, trained
from tests.support.converting import to_8_bits
from tests.support.replayed_experts import log_probs_through
from tests.support.tiny_model import PRINTABLE, character_tokenizer
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint

SECONDS = 600


@pytest.mark.extra(each=True)
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("aware", [False, True])
def test_a_run_with_engines_of_fewer_bits(aware: bool, small_run: Callable[..., Path], tmp_path: Path, tiny_model: Path) -> None:
    """From a checkpoint of 8-bit floats; or from a plain one in 4-bit integers, which the trainer computes with as well."""
    config, root = small_run("eight", steps=40, staleness=1), tmp_path / "runs" / "eight"
    other = [] if aware else ["--hf-checkpoint", str(to_8_bits(tiny_model, tmp_path / "model-fp8", 16))]
    flags = ["--save-interval", "2", *(["--rollout-precision", "int4", "--quantization-aware"] if aware else other)]
    with LaunchedRun(config, root, "eight", flags) as run:
        run.until("4 steps", lambda cards: trained(cards) >= 4, SECONDS)
        run.kill(run.process.pid)
        run.process.wait(60)
    with LaunchedRun(config, root, "eight", flags) as run:
        summary = run.ended(40, SECONDS)
    apart = summary["mean_abs_logprob_diff"]
    assert isinstance(apart, float) and (apart < 1e-4 if aware else 1e-5 < apart < 0.5)  # rounding; 1e-6 without


RUN_SECONDS = 900
FUNCTION = ("--custom-generate-function-path", "slime.rollout.sglang_rollout:generate", "--support-replay", "on")
AGENT = ("--agent", "examples.agents.openai_calculator:run")


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
@pytest.mark.parametrize("flags", [(), FUNCTION, AGENT], ids=["engine", "function", "agent"])
def test_a_run_trains_over_the_tokens_that_were_kept(small_run: Callable[..., Path], tmp_path: Path, flags: tuple[str, ...]) -> None:
    root = tmp_path / "runs" / "kept"
    config = small_run("kept", steps=2, staleness=1)
    with LaunchedRun(config, root, "kept", ["--rollout-top-p", "0.8", "--rollout-max-response-len", "12", *flags]) as run:
        summary = run.ended(2, RUN_SECONDS)
    assert summary["mean_abs_logprob_diff"] < 1e-3
    events = EventAccumulator(str(root / "tensorboard"))
    events.Reload()
    assert all(scalar.value > 1 for scalar in events.Scalars("rollout/kept_tokens"))
    assert "train/support_mismatch" not in events.Tags()["scalars"]


@pytest.fixture
def moe_run(tmp_path: Path) -> Path:
    """The config of a run of two steps of a tiny MoE without a warm start: the first step's weights are the checkpoint's."""
    model = tmp_path / "model"
    make_checkpoint("qwen3_moe", model)
    character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(model)
    config = write_small_run(tmp_path, model, "replay", steps=2, staleness=0)
    head, _, rest = config.read_text().partition("[sft]")
    config.write_text(head + rest[rest.index("[bus]") :])
    return config


def dumped(root: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What rank 0 has trained in a step, and the description of it."""
    with safe_open(root / "dumps" / f"tensors_{step}_0.safetensors", framework="pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["myxo"])


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_the_experts_of_the_engine_are_trained(moe_run: Path, tmp_path: Path) -> None:
    """The engine computes in bfloat16 and chooses otherwise than the trainer would for some tokens. The trainer's log-probs are those of
    Hugging Face's model through the engine's experts, not of the model that chooses by itself."""
    root = tmp_path / "runs" / "replay"
    flags = [
        *("--use-rollout-routing-replay", "--sglang-dtype", "bfloat16", "--rollout-max-response-len", "48"),
        *("--save-debug-train-data", str(root / "dumps" / "tensors_{rollout_id}_{rank}.safetensors")),
    ]
    with LaunchedRun(moe_run, root, "replay", flags) as run:
        run.ended(2, RUN_SECONDS)
    tensors, described = dumped(root, 0)
    assert all(result["skipped"] is None for result in described["results"])
    model, otherwise, own_gap = tmp_path / "model", 0, 0.0
    for micro_batch in sorted({name.rpartition(".")[0] for name in tensors}):
        of = {field: tensors[f"{micro_batch}.{field}"] for field in ("tokens", "labels", "loss_mask", "experts", "trainer_log_probs")}
        starts = tensors[f"{micro_batch}.cu_seqlens"].tolist()
        for start, stop in pairwise(starts):
            part = {field: tensor[start:stop] for field, tensor in of.items()}
            trained = part["loss_mask"] > 0
            given = part["experts"]
            if not trained.any():
                continue
            assert (given[:-1] >= 0).all(), "the engine has told the experts of all tokens"
            found = part["trainer_log_probs"]
            replayed = log_probs_through(model, part["tokens"], part["labels"], given)
            own = log_probs_through(model, part["tokens"], part["labels"], torch.full_like(given, -1))
            assert (found - replayed)[trained].abs().max() < 1e-4
            own_gap = max(own_gap, float((found - own)[trained].abs().max()))
            otherwise += int((found - own)[trained].abs().gt(1e-3).sum())
    assert otherwise and own_gap > 1e-2, "no expert was another than the trainer's own: nothing was shown"


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_the_choice_of_the_pass_before_is_trained(moe_run: Path, tmp_path: Path) -> None:
    """Two optimizer steps a batch: the second replays what the pass before the first has chosen. Losses of balance are measured too."""
    root = tmp_path / "runs" / "replay"
    flags = [
        *("--use-routing-replay", "--num-steps-per-rollout", "2", "--lr", "1e-3"),
        *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.01"),
        *("--save-debug-train-data", str(root / "dumps" / "tensors_{rollout_id}_{rank}.safetensors")),
    ]
    with LaunchedRun(moe_run, root, "replay", flags) as run:
        run.ended(2, RUN_SECONDS)
    _, described = dumped(root, 1)
    assert [result["skipped"] for result in described["results"]] == [None, None]
    assert all(0.9 < result["metrics"]["seq_load_balancing_loss"] < 4 for result in described["results"])
