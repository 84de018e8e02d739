"""Experts: their grouped product, and the dispatchers of their tokens."""

import pytest
import torch

from services.trainer.megatron import moe
from services.trainer.megatron.moe import GroupedExperts, PaddedAllGatherDispatcher, TokenPermutation, stacked
from shared.config import flag_table
from shared.runtime.errors import ConfigError
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.rank_steps import actor, weighted_loss
from tests.unit.trainer.megatron.tiny import pack, sequences


def trained(hf_dir, loops, monkeypatch, **trainer):
    monkeypatch.setattr(GroupedExperts, "loops", loops)
    model = actor(hf_dir, **trainer)
    batches = [pack(sequences(4, seed=seed)) for seed in (1, 2)]
    step = model.train_step(batches, weighted_loss, need_entropy=True)
    trains = [(name, parameter) for name, parameter in model.model.modules[0].named_parameters() if parameter.requires_grad]
    gradients = {name: parameter.main_grad.clone() for name, parameter in trains}
    log_probs = torch.cat(model.log_probs(batches))
    return step, gradients, log_probs


@pytest.mark.parametrize(
    ("kind", "whole", "more"),
    [
        ("qwen3_moe", True, {}),
        pytest.param("qwen3_moe", False, {}, marks=pytest.mark.extra),
        pytest.param("deepseek_v3", True, {}, marks=pytest.mark.extra),
        ("deepseek_v3", False, {}),
        ("gpt_oss", True, {}),
        pytest.param("gpt_oss", False, {}, marks=pytest.mark.extra),
        ("qwen3_moe", True, {"lora_rank": 4}),
        pytest.param("deepseek_v3", True, {"lora_rank": 8, "target_modules": ("up_proj", "down_proj")}, marks=pytest.mark.extra),
    ],
)
def test_groups_equal_the_loop(kind, whole, more, hf, monkeypatch):
    seen = []
    original = moe.stacked
    monkeypatch.setattr(moe, "stacked", lambda tensors: seen.append(original(tensors)) or seen[-1])
    expected, loop, before = trained(hf(kind), True, monkeypatch, use_distributed_optimizer=whole, **more)
    assert not seen
    found, grouped, after = trained(hf(kind), False, monkeypatch, use_distributed_optimizer=whole, **more)
    assert seen and (not whole or all(view is not None for view in seen)), "matrices were copied"
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, abs=1e-5)
    assert loop.keys() == grouped.keys()
    for name, gradient in loop.items():
        assert torch.allclose(grouped[name], gradient, atol=1e-5), name
    assert torch.allclose(before, after, atol=1e-4)


def test_frozen_experts_get_no_gradient(hf, monkeypatch):
    monkeypatch.setattr(GroupedExperts, "loops", False)
    model = actor(hf("qwen3_moe"), freeze_params_name_list=[r"\.experts\."])
    before = {name: tensor.clone() for name, tensor in model.model.modules[0].named_parameters() if ".experts." in name}
    step = model.train_step([pack(sequences(4))], weighted_loss, need_entropy=True)
    assert step.grad_norm > 0 and before
    for name, tensor in model.model.modules[0].named_parameters():
        assert name not in before or torch.equal(tensor, before[name])


def test_tokens_come_back_from_their_order():
    generator = torch.Generator().manual_seed(2)
    routing = torch.zeros(11, 6, dtype=torch.bool)
    routing.scatter_(1, torch.rand(11, 6, generator=generator).argsort(1)[:, :3], True)
    hidden = torch.randn(11, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    order = TokenPermutation.of(routing, 3)
    experts = torch.arange(6).repeat_interleave(routing.sum(0))
    assert all(routing[token, expert] for token, expert in zip(order.tokens.tolist(), experts.tolist(), strict=True))
    assert torch.equal(order.ordered(hidden), hidden[order.tokens])
    assert torch.allclose(order.restored(order.ordered(hidden)), 3 * hidden)
    probs = torch.rand(11, 6, generator=generator)
    assert torch.equal(order.weights(probs), probs[order.tokens, experts])
    assert torch.autograd.gradcheck(lambda given: order.restored(order.ordered(given) ** 2), hidden)


def test_only_matrices_at_one_distance_are_a_stack():
    memory = torch.arange(96.0)
    even = [memory[start : start + 8].view(2, 4) for start in (0, 16, 32)]
    view = stacked(even)
    assert view is not None and torch.equal(view, torch.stack(even)) and view.data_ptr() == memory.data_ptr()
    assert stacked([even[0], even[2], even[1]]) is None
    assert stacked([memory[start : start + 8].view(2, 4) for start in (0, 16, 40)]) is None
    assert stacked([tensor.clone() for tensor in even[:2]]) is None


# --- the dispatchers of tokens give the same values; one that is not there is told or refused

ALLGATHER = {"megatron": {"moe_token_dispatcher_type": "allgather"}}
LAYOUTS = {"EP2": {"expert_model_parallel_size": 2}, "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}


def dispatched(hf_dir, config):
    """Losses and norms of two steps; log-probs of micro-batches that differ in length from rank to rank; the dispatchers."""
    model = rank_steps.actor(hf_dir, **config)
    kinds = {type(layer.mlp.token_dispatcher) for layer in model.model.modules[0].decoder.layers}
    batch = pack(sequences(3 + model.data_parallel_rank, seed=9))
    steps = rank_steps.steps(model, 2)
    return kinds, [(step.loss, step.grad_norm) for step in steps], model.log_probs([batch])[0]


@pytest.mark.parametrize("layout", ["EP2", pytest.param("TP2 SP", marks=pytest.mark.extra)])
def test_an_allgather_equals_the_all_to_all(layout, hf, two_ranks):
    expected = two_ranks.run(dispatched, hf("qwen3_moe"), LAYOUTS[layout])
    for found, other in zip(two_ranks.run(dispatched, hf("qwen3_moe"), {**LAYOUTS[layout], **ALLGATHER}), expected, strict=True):
        assert found[0] == {PaddedAllGatherDispatcher} != other[0]
        for numbers, others in zip(found[1], other[1], strict=True):
            assert numbers == pytest.approx(others, rel=1e-5, abs=1e-5)
        assert torch.allclose(found[2], other[2], atol=1e-4)


def test_what_does_not_go_with_it_is_refused(hf):
    with pytest.raises(ConfigError, match="moe_token_dispatcher_type = 'allgather': .*moe_shared_expert_overlap"):
        rank_steps.actor(hf("glm4_moe"), megatron={"moe_token_dispatcher_type": "allgather", "moe_shared_expert_overlap": True})


def test_deepep_is_told_to_be_missing():
    given = {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"}
    told = dict(flag_table.without_effect(given))
    assert told.keys() == {"--moe-enable-deepep", "--moe-token-dispatcher-type"}
    assert all("DeepEP is not installed" in reason for reason in told.values())
    assert not dict(flag_table.without_effect({"moe_token_dispatcher_type": "allgather"}))
