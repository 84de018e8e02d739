"""Families whose layers differ from the plain ones, over two ranks: loaded, exported and trained as in one process."""

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.megatron.hf_weights import weights_of
from tests.unit.trainer.megatron import rank_steps

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
WHOLE_EXPERTS = {**TENSOR, "expert_tensor_parallel_size": 1}
CONTEXT = {"context_parallel_size": 2}
CASES = [("glm4_moe", PIPELINE), ("deepseek_v3", CONTEXT), ("qwen3_next", TENSOR)]
MORE = [
    ("gpt_oss", WHOLE_EXPERTS),
    ("gemma3_text", TENSOR),
    ("glm_moe_dsa", TENSOR),
    ("deepseek_v3", EXPERT),
    ("minimax_m2", TENSOR),
    ("glm4", TENSOR),
    ("moonlight", TENSOR),
    ("gpt_oss", EXPERT),
    ("gpt_oss", CONTEXT),
    ("qwen3_next", PIPELINE),
]
MORE += [("qwen3_5", {"tensor_model_parallel_size": 2}), ("qwen3_5_moe", EXPERT), ("glm_moe_dsa", PIPELINE)]
MORE += [("glm4", PIPELINE), ("glm4", CONTEXT), ("glm4_moe", TENSOR), ("glm4_moe", EXPERT), ("deepseek_v3", TENSOR)]
MORE += [
    ("deepseek_v3", PIPELINE),
    ("moonlight", PIPELINE),
    ("moonlight", EXPERT),
    ("minimax_m2", PIPELINE),
    ("minimax_m2", EXPERT),
    ("minimax_m2", CONTEXT),
    ("gpt_oss", PIPELINE),
    ("qwen3_next", EXPERT),
    ("qwen3_5", TENSOR),
    ("qwen3_5", PIPELINE),
    ("qwen3_5_moe", WHOLE_EXPERTS),
    ("qwen3_5_moe", PIPELINE),
    ("glm_moe_dsa", EXPERT),
    ("glm4_moe_lite", TENSOR),
    ("glm4_moe_lite", EXPERT),
    ("qwen2_moe", TENSOR),
    ("qwen2_moe", EXPERT),
    ("deepseek_v32", TENSOR),
    ("deepseek_v32", PIPELINE),
    ("deepseek_v32", CONTEXT),
    ("gemma3_text", {"tensor_model_parallel_size": 2}),
    ("gemma3_text", PIPELINE),
    ("mistral", TENSOR),
    ("mistral", PIPELINE),
    ("qwen3_next", CONTEXT),
    ("glm_moe_dsa", CONTEXT),
    ("gemma3_text", CONTEXT),
    ("qwen3_5", CONTEXT),
    ("qwen3_5_moe", CONTEXT),
]


def export_and_train(hf_dir, config):
    """What is exported at first, then losses and gradient norms of two steps, then the routers' biases."""
    model = rank_steps.actor(hf_dir, **config)
    weights = rank_steps.exported(model)
    results = rank_steps.steps(model, 2)
    biases = {name: t for name, t in rank_steps.exported(model).items() if name.endswith("e_score_correction_bias")}
    return weights, [(step.loss, step.grad_norm) for step in results], biases


@pytest.mark.parametrize(("kind", "config"), [*CASES, *(pytest.param(*case, marks=pytest.mark.extra) for case in MORE)])
def test_a_layout_changes_nothing(kind, config, hf, two_ranks, once):
    loaded = load_file(hf(kind) / "model.safetensors")
    (weights, steps, biases), (other, _, _) = two_ranks.run(export_and_train, hf(kind), config)
    assert weights.keys() == loaded.keys() and set(other.values()) == {None}
    for name, tensor in weights.items():
        assert torch.equal(tensor, loaded[name]), name
    for (loss, norm), (expected_loss, expected_norm) in zip(steps, once(export_and_train, hf(kind), {})[1], strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in biases.items())
    assert bool(biases) == (kind in ("glm4_moe", "deepseek_v3", "moonlight", "minimax_m2", "glm_moe_dsa", "deepseek_v32", "glm4_moe_lite"))


def test_router_biases_keep_float32_in_a_bfloat16_model(hf, make_actor):
    loaded = load_file(hf("deepseek_v3") / "model.safetensors")
    actor = make_actor("deepseek_v3", train_dtype="bfloat16")
    out = rank_steps.exported(actor)
    float32 = {name for name, tensor in out.items() if tensor.dtype == torch.float32}
    assert float32 == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert all(torch.equal(out[name], loaded[name]) for name in float32)
    assert [name for module in actor.model.modules for name, _ in weights_of(module) if "expert_bias" in name]
