"""Quantization-aware training: what layers compute with, and what moves the weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.megatron.hf_weights import parameters
from services.trainer.weights.snapshot_writer import on_host
from shared.model.quantization import in_groups, quantization_of
from shared.runtime.errors import ConfigError
from shared.transfer.quantizer import FakeQuantized, plain, quantized
from tests.support.converting import quantized_checkpoint
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import make_checkpoint


def chosen(actor: Actor) -> dict[str, Tensor]:
    quantization = quantization_of(actor.hf_dir)
    assert quantization is not None
    model = actor.model
    held = parameters(model.modules, model.config, model.architecture)  # type: ignore[attr-defined]
    return {local.name: local.parameter for local in held if quantization.names & set(local.recipe.names)}


def loss_and_gradients(actor: Actor) -> tuple[float, dict[str, Tensor]]:
    """Returns a batch's loss and its gradients; the weights stay, with a learning rate of 0."""
    result = actor.train_step(rank_steps.share(actor, 3), rank_steps.weighted_loss, need_entropy=True)
    return result.loss, {name: parameter.main_grad.clone() for name, parameter in chosen(actor).items()}  # type: ignore[attr-defined]


FIXED = {"lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0, "clip_grad": 1e9}


@pytest.mark.parametrize(
    ("kind", "sizes", "how"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 32}, []),
        pytest.param("qwen3", {}, ["--layout", "awq"], marks=pytest.mark.extra),
        pytest.param("qwen3_moe", {"moe_intermediate_size": 32}, ["--experts-only"], marks=pytest.mark.extra),
    ],
)
def test_gradients_are_those_at_the_rounded_weights(kind: str, sizes: dict[str, int], how: list[str], tmp_path: Path) -> None:
    """Log-probs, loss and gradients are, to the bit, those of a trainer whose weights were rounded by hand; finite differences agree."""
    make_checkpoint(kind, tmp_path / "whole", hidden_size=64, intermediate_size=96, **sizes)
    model = quantized_checkpoint(tmp_path / "whole", tmp_path / "model", "int4", *how)
    form = quantization_of(model).format  # type: ignore[union-attr]
    batch = rank_steps.micro_batch(1)
    try:
        aware = rank_steps.actor(model, quantization_aware=True, **FIXED)
        with torch.no_grad():
            for parameter in chosen(aware).values():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
        kept = {name: parameter.clone() for name, parameter in chosen(aware).items()}
        loss, found = loss_and_gradients(aware)
        log_probs = aware.log_probs([batch])[0]
        assert all(torch.equal(parameter, kept[name]) for name, parameter in chosen(aware).items()) and len(kept) >= 8
        rank_steps.runtime.stop()
        other = rank_steps.actor(model, **FIXED)
        rounded = {name: plain(quantized(weight, form), form, torch.float32) for name, weight in kept.items()}
        assert any(not torch.equal(rounded[name], kept[name]) for name in kept)
        lay(other, rounded)
        assert torch.equal(other.log_probs([batch])[0], log_probs)
        own_loss, own = loss_and_gradients(other)
        assert own_loss == loss and all(torch.equal(own[name], found[name]) for name in own)
        slope = sum(float(gradient.double().square().sum()) for gradient in found.values()) ** 0.5
        direction = {name: gradient / slope for name, gradient in found.items()}
        step, ends = 5e-4, list[float]()
        for sign in (1, -1):
            lay(other, {name: rounded[name] + sign * step * direction[name] for name in rounded})
            ends.append(loss_and_gradients(other)[0])
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=3e-2)
    finally:
        rank_steps.runtime.stop()


@torch.no_grad()
def lay(actor: Actor, weights: dict[str, Tensor]) -> None:
    for name, parameter in chosen(actor).items():
        parameter.copy_(weights[name])


def test_what_cannot_be_rounded_is_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "whole", hidden_size=64, intermediate_size=96)
    for model in (tmp_path / "whole", quantized_checkpoint(tmp_path / "whole", tmp_path / "blocks", "fp8-block")):
        with pytest.raises(ConfigError, match="trainer.quantization_aware = True: false, or a model.hf_checkpoint in groups"):
            rank_steps.actor(model, quantization_aware=True)
        rank_steps.runtime.stop()


def test_the_gradient_passes_straight_through() -> None:
    weight = torch.randn(4, 64, requires_grad=True)
    factor = torch.randn(4, 64)
    (FakeQuantized.apply(weight, in_groups(32)) * factor).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, factor)


def test_a_snapshot_holds_what_a_push_sends_whatever_the_dtype_on_the_wire(tmp_path: Path) -> None:
    """Both round the matrices themselves; what is not quantized travels in the dtype."""
    make_checkpoint("qwen3", tmp_path / "whole", hidden_size=64, intermediate_size=96)
    actor = rank_steps.actor(quantized_checkpoint(tmp_path / "whole", tmp_path / "model", "int4"))
    try:
        rank_steps.steps(actor, 2)
        written = {
            name: tensor for bucket in actor.export(4096, "bfloat16") for name, tensor in on_host(bucket, actor.quantization).items()
        }
        pushed = rank_steps.pushed(actor, dtype="bfloat16", quantization=actor.quantization)
        assert written.keys() == pushed.keys() and {name.rpartition(".")[2] for name in written} == {
            "weight",
            "weight_packed",
            "weight_scale",
        }
        for name, (dtype, _, held) in written.items():
            assert dtype == str(pushed[name].dtype).removeprefix("torch."), name
            assert held.tobytes() == pushed[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes(), name
    finally:
        rank_steps.runtime.stop()
