"""Losses of balance and biases that move: their numbers are those of the formulas, their gradients enter once, in every layout."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.megatron.expert_balance import METRICS, BalancedRouter, routers
from services.trainer.packing import PackedBatch
from services.trainer.packing import pack as pack_samples
from shared.runtime.errors import ConfigError
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.rank_steps import actor, exported, share, weighted_loss
from tests.unit.trainer.megatron.tiny import pack, sequences

EXPERTS, PER_TOKEN = 4, 2
ALL = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.02, 0.03, 0.05],
    "moe_z_loss_coeff": 0.01,
}
WITHOUT_GLOBAL = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.2, 0.3], "moe_z_loss_coeff": 0.1}
LAYOUTS = {
    "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute": True},
    "CP2": {"context_parallel_size": 2, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "PP2": {"pipeline_model_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
}


def nothing(log_probs, entropy, batch):
    return log_probs.sum() * 0, {}


def logits_of(model, batches):
    """By layer, micro-batch by micro-batch, what the routers compute in a step that changes nothing."""
    seen = {}
    hooked = BalancedRouter.routing

    def look(router, logits, padding_mask=None):
        seen.setdefault(router.layer_number, []).append(logits.detach().view(-1, EXPERTS).double().numpy())
        return hooked(router, logits, padding_mask)

    BalancedRouter.routing = look
    try:
        model.log_probs(batches)
    finally:
        BalancedRouter.routing = hooked
    return seen


def by_hand(logits, batches):
    """The four losses of one layer, before their coefficients: float64, by the formulas."""
    lengths = [batch.cu_seqlens.diff().tolist() for batch in batches]
    tokens, count = sum(map(sum, lengths)), sum(map(len, lengths))
    found, seen, seen_tokens = dict.fromkeys(METRICS, 0.0), np.zeros(EXPERTS), 0

    def balance(scores, counts, of):
        return EXPERTS / PER_TOKEN * (scores.mean(0) * counts / of).sum()

    for each, sizes in zip(logits, lengths, strict=True):
        highest = each.max(1, keepdims=True)
        sums = np.exp(each - highest).sum(1, keepdims=True)
        scores = np.exp(each - highest) / sums
        chosen = np.zeros_like(scores)
        np.put_along_axis(chosen, np.argsort(-scores, 1)[:, :PER_TOKEN], 1.0, 1)
        share_of_step = len(each) / tokens
        seen, seen_tokens = seen + chosen.sum(0), seen_tokens + len(each)
        found["z_loss"] += ((highest + np.log(sums)) ** 2).sum() / tokens
        found["aux_loss"] += share_of_step * balance(scores, chosen.sum(0), len(each))
        found["global_aux_loss"] += share_of_step * balance(scores, seen, seen_tokens)
        for start, size in zip(np.cumsum([0, *sizes[:-1]]), sizes, strict=True):
            part = slice(start, start + size)
            found["seq_aux_loss"] += balance(scores[part], chosen[part].sum(0), size) / count
    return found


def test_the_losses_are_those_of_the_formulas(hf):
    batches = [pack(sequences(count, seed=count)) for count in (3, 5, 2)]
    model = actor(hf("qwen3_moe"), lr=0.0, megatron=ALL)
    layers = [by_hand(logits, batches) for logits in logits_of(model, batches).values()]
    metrics = model.train_step(batches, weighted_loss, need_entropy=True).metrics
    for kind, name in METRICS.items():
        assert metrics[name] == pytest.approx(np.mean([layer[kind] for layer in layers]), rel=1e-5), kind


def reference_gradient(weight, hidden, batches, coefficients):
    """That of one layer's router, by autograd in float64; counts of tokens are constants. hidden: [T, H] by micro-batch."""
    weight = weight.detach().double().requires_grad_()
    lengths = [batch.cu_seqlens.diff().tolist() for batch in batches]
    tokens, count = sum(map(sum, lengths)), sum(map(len, lengths))
    total, seen, seen_tokens = 0.0, 0.0, 0
    for each, sizes in zip(hidden, lengths, strict=True):
        logits = each.double() @ weight.T
        scores = logits.softmax(-1)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(PER_TOKEN).indices, 1.0)
        seen, seen_tokens = seen + chosen.sum(0), seen_tokens + len(each)
        share, scale = len(each) / tokens, EXPERTS / PER_TOKEN
        total += coefficients["z_loss"] * logits.logsumexp(-1).square().sum() / tokens
        total += coefficients["aux_loss"] * share * scale * (scores.mean(0) * chosen.mean(0)).sum()
        total += coefficients["global_aux_loss"] * share * scale * (scores.mean(0) * seen / seen_tokens).sum()
        for part, of in zip(scores.split(sizes), chosen.split(sizes), strict=True):
            total += coefficients["seq_aux_loss"] * scale * (part.mean(0) * of.mean(0)).sum() / count
    return torch.autograd.grad(total, weight)[0]


def test_the_gradient_is_that_of_the_weighted_losses(hf):
    """The objective adds nothing: what the last router's weight gets is of the losses alone, once."""
    batches = [pack(sequences(count, seed=count)) for count in (3, 5)]
    model = actor(hf("qwen3_moe"), lr=0.0, clip_grad=1e6, megatron=ALL)
    *_, last = routers(model.model.modules)
    hidden = []
    last.register_forward_pre_hook(lambda _, given: hidden.append(given[0].detach().reshape(-1, given[0].size(-1))))
    model.train_step(batches, nothing)
    expected = reference_gradient(last.weight, hidden, batches, model.model.balancing.coefficients)
    assert expected.norm() > 1e-2
    torch.testing.assert_close(last.weight.main_grad.double(), expected, atol=1e-6, rtol=1e-3)


@pytest.mark.extra
def test_balanced_steps_spread_the_tokens(hf):
    config = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}
    model = actor(hf("qwen3_moe"), lr=3e-3, megatron=config)
    batches = [pack(sequences(8, seed=1))]
    values = [model.train_step(batches, nothing).metrics["global_load_balancing_loss"] for _ in range(20)]
    assert values[-1] < values[0] - 0.05


def test_neither_packing_nor_fillers_count(hf):
    model = actor(
        hf("qwen3_moe"), lr=0.0, megatron=WITHOUT_GLOBAL | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
    )
    whole = sequences(6)
    filler = pack_samples((), ())
    filler = PackedBatch(**{**vars(filler), "fields": {"advantages": filler.loss_mask}})
    expected = model.train_step([pack(whole)], nothing)
    found = model.train_step([pack(whole[:1]), pack(whole[1:4]), filler, pack(whole[4:])], nothing)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4) and found.grad_norm > 1e-4
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)


def balanced_steps(hf_dir, layout, megatron):
    model = actor(hf_dir, megatron=megatron, **layout)
    steps = [model.train_step(share(model, seed), weighted_loss, need_entropy=True) for seed in range(2)]
    biases = {name: tensor for name, tensor in exported(model).items() if name.endswith("e_score_correction_bias")}
    return [(step.loss, step.grad_norm, step.metrics) for step in steps], biases


@pytest.mark.parametrize("layout", ["TP2 SP", *(pytest.param(layout, marks=pytest.mark.extra) for layout in ("EP2", "CP2", "PP2"))])
def test_layouts_balance_as_one_process(layout, hf, once, two_ranks):
    expected, _ = once(balanced_steps, hf("qwen3_moe"), {}, WITHOUT_GLOBAL)
    for steps, _ in two_ranks.run(balanced_steps, hf("qwen3_moe"), LAYOUTS[layout], WITHOUT_GLOBAL):
        for (loss, norm, metrics), (expected_loss, expected_norm, expected_metrics) in zip(steps, expected, strict=True):
            assert loss == pytest.approx(expected_loss, abs=1e-5)
            assert norm == pytest.approx(expected_norm, abs=1e-4)
            assert metrics == pytest.approx(expected_metrics, rel=1e-4)


def one_global_step(hf_dir, layout):
    """Each data-parallel rank has one micro-batch; alone, the one process has both as one."""
    model = actor(hf_dir, lr=0.0, megatron={"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.5}, **layout)
    parts = [sequences(4, seed=1), sequences(6, seed=2)]
    mine = parts[model.data_parallel_rank] if model.data_parallel_size > 1 else parts[0] + parts[1]
    step = model.train_step([pack(mine)], nothing)
    return step.grad_norm, step.metrics


@pytest.mark.parametrize("layout", [LAYOUTS["EP2"], *(pytest.param(layout, marks=pytest.mark.extra) for layout in ({}, LAYOUTS["TP2 SP"]))])
def test_the_global_loss_sees_all_ranks(layout, hf, once, two_ranks):
    norm, metrics = once(one_global_step, hf("qwen3_moe"), {})
    for found_norm, found_metrics in two_ranks.run(one_global_step, hf("qwen3_moe"), layout):
        assert found_norm == pytest.approx(norm, rel=1e-4) and norm > 1e-4
        assert found_metrics == pytest.approx(metrics, rel=1e-5)


# --- biases

RATE = 0.125


def test_biases_move_towards_experts_with_too_few_tokens(hf, tmp_path):
    """By numpy: the sign of what an expert lacks of the mean, once a step; exports, saves and resumes hold them."""
    kind = "deepseek_v3"
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model = actor(hf(kind), megatron={"moe_router_bias_update_rate": RATE})
    before = load_file(hf(kind) / "model.safetensors")[name]
    batches = [pack(sequences(5, seed=seed)) for seed in (1, 2)]
    _, recorded = model.log_probs_and_routing(batches)
    counts = np.zeros(8)
    for routing in recorded:
        counts += np.bincount(routing[2].numpy().ravel(), minlength=8)
    model.train_step(batches, weighted_loss, need_entropy=True)
    moved = exported(model)[name]
    assert torch.equal(moved, before + RATE * torch.from_numpy(np.sign(counts.mean() - counts)).float())
    assert not torch.equal(moved, before)
    model.save_checkpoint(tmp_path, 1)
    straight = [model.train_step(batches, weighted_loss, need_entropy=True).loss, exported(model)[name]]
    again = actor(hf(kind), megatron={"moe_router_bias_update_rate": RATE})
    again.load_checkpoint(tmp_path)
    assert torch.equal(exported(again)[name], moved)
    resumed = [again.train_step(batches, weighted_loss, need_entropy=True).loss, exported(again)[name]]
    assert resumed[0] == straight[0] and torch.equal(resumed[1], straight[1])


def test_a_skipped_step_moves_no_bias(hf):
    model = actor(hf("deepseek_v3"), megatron={"moe_router_bias_update_rate": RATE})
    before = [router.expert_bias.clone() for router in routers(model.model.modules)]
    step = model.train_step([pack(sequences(3))], lambda log_probs, *_: (log_probs.sum() * float("nan"), {}))
    assert step.skipped and before
    assert all(torch.equal(router.expert_bias, old) for router, old in zip(routers(model.model.modules), before, strict=True))


@pytest.mark.extra
@pytest.mark.parametrize("layout", ["EP2", "PP2"])
def test_biases_move_alike_in_every_layout(layout, hf, two_ranks):
    megatron = {"moe_router_bias_update_rate": RATE}
    _, expected = balanced_steps(hf("deepseek_v3"), {}, megatron)
    _, found = two_ranks.run(balanced_steps, hf("deepseek_v3"), LAYOUTS[layout], megatron)[0]
    assert expected and found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_cannot_be_balanced_is_refused(hf):
    with pytest.raises(ConfigError, match="moe_router_bias_update_rate = 0.1: .*have no bias"):
        actor(hf("qwen3_moe"), megatron={"moe_router_bias_update_rate": 0.1})
    with pytest.raises(ConfigError, match="moe_router_bias_update_rate = 0.1: .*adapter"):
        actor(hf("deepseek_v3"), megatron={"moe_router_bias_update_rate": 0.1}, lora_rank=4, target_modules=["o_proj"])
    with pytest.raises(ConfigError, match="prefix_sharing = 'on': .*balance of experts"):
        actor(hf("qwen3_moe"), megatron={"moe_aux_loss_coeff": 0.1}, prefix_sharing="on")
    assert rank_steps.refused(hf("qwen3_moe"), {"megatron": {"moe_router_load_balancing_type": "sinkhorn"}}) != "nothing"
