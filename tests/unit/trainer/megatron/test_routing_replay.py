"""Replayed routing: the experts that are given are used, in every pass and layout, and the router still learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.packing import PackedBatch, routed_keys, shared_prefixes
from tests.support.replayed_experts import log_probs_through
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.rank_steps import actor, weighted_loss
from tests.unit.trainer.megatron.tiny import VOCAB, pack, sequences

EXPERTS, PER_TOKEN = 4, 2
LAYOUTS = {
    "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute": True},
    "CP2": {"context_parallel_size": 2, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "PP2": {"pipeline_model_parallel_size": 2, "recompute": True},
    "EP2": {"expert_model_parallel_size": 2},
}


def chosen_at_random(tokens: int, seed: int) -> torch.Tensor:
    """int16 [tokens, 2 layers, 2 experts]: two different experts for each; the last token of none is told."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.rand(tokens, 2, EXPERTS, generator=generator).argsort(-1)[..., :PER_TOKEN].to(torch.int16)
    choices[-1] = -1
    return choices


def routed(batch: PackedBatch, seed: int) -> PackedBatch:
    return replace(batch, experts=chosen_at_random(batch.tokens.numel(), seed))


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_the_given_experts_are_computed(kind, hf):
    batch = pack([torch.randint(0, VOCAB, (23,), generator=torch.Generator().manual_seed(5))])
    model = actor(hf(kind))
    [own] = model.log_probs([batch])
    for seed in (1, 2):
        given = routed(batch, seed)
        [found] = model.log_probs([given])
        expected = log_probs_through(hf(kind), given.tokens, given.labels, given.experts)
        assert torch.allclose(found[:-1], expected[:-1], atol=2e-5)
        assert (found - own)[:-1].abs().max() > 1e-2  # other experts than the router's


def test_the_router_learns_by_the_scores_of_the_replayed_experts(hf):
    model, batch = actor(hf("qwen3_moe"), lr=0.0), routed(pack(sequences(4)), 3)
    model.train_step([batch], weighted_loss, need_entropy=True)
    for layer in model.model.modules[0].decoder.layers:
        assert layer.mlp.router.weight.main_grad.abs().max() > 1e-4


def test_a_recorded_pass_is_repeated_under_other_weights(hf):
    """Also by routers that would have chosen otherwise by then, and where layers are computed again in the backward pass."""
    batches = [pack(sequences(4, seed=seed)) for seed in (1, 2)]
    model = actor(hf("qwen3_moe"), recompute_granularity="selective", recompute_modules=["moe"])
    _, recorded = model.log_probs_and_routing(batches)
    replayed = [replace(batch, routing=routing) for batch, routing in zip(batches, recorded, strict=True)]
    with torch.no_grad():
        for layer in model.model.modules[0].decoder.layers:
            layer.mlp.router.weight.normal_()
    own, again = model.log_probs_and_routing(batches), model.log_probs_and_routing(replayed)
    for index, routing in enumerate(recorded):
        assert all(torch.equal(again[1][index][layer], chosen) for layer, chosen in routing.items())
        assert any(not torch.equal(own[1][index][layer], chosen) for layer, chosen in routing.items())
    routers = [layer.mlp.router.weight.detach().clone() for layer in model.model.modules[0].decoder.layers]
    again = model.train_step(replayed, weighted_loss, need_entropy=True)
    kept = actor(hf("qwen3_moe"))  # nothing is computed again there
    with torch.no_grad():
        for layer, weight in zip(kept.model.modules[0].decoder.layers, routers, strict=True):
            layer.mlp.router.weight.copy_(weight)
    expected = kept.train_step(replayed, weighted_loss, need_entropy=True)
    assert again.loss == pytest.approx(expected.loss, abs=1e-6)
    assert again.grad_norm == pytest.approx(expected.grad_norm, abs=1e-5)


@pytest.mark.parametrize("layout", ["TP2 SP", "EP2", *(pytest.param(layout, marks=pytest.mark.extra) for layout in ("CP2", "PP2"))])
def test_layouts_replay_what_one_process_replays(layout, hf, once, two_ranks):
    expected = once(rank_steps.replayed_steps, hf("qwen3_moe"), {})
    for number, rank in enumerate(two_ranks.run(rank_steps.replayed_steps, hf("qwen3_moe"), LAYOUTS[layout])):
        assert rank["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert rank["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-4)
        shares = len(expected["log_probs"]) // len(rank["log_probs"])
        for name in ("log_probs", "recorded"):
            for own, whole in zip(rank[name], expected["log_probs"][number % shares :: shares], strict=True):
                assert (own - whole).abs().max() < 1e-4


def test_beginnings_are_shared_where_the_experts_agree(hf):
    start = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    ends = [torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8])]
    batch = pack([torch.cat([start, end]) for end in ends])
    experts = chosen_at_random(len(batch.tokens), 4)
    experts[15:27] = experts[:12]
    experts[20] = 3 - experts[20]  # the sixth token of the second sequence goes elsewhere
    keys = routed_keys(batch.tokens.numpy(), experts.numpy())
    assert shared_prefixes(keys, [0, 15, 30]).shared.tolist() == [0, 4]
    assert shared_prefixes(batch.tokens.numpy(), [0, 15, 30]).shared.tolist() == [0, 11]
    given = replace(batch, experts=experts)
    [shared] = actor(hf("qwen3_moe"), prefix_sharing="on").log_probs([given])
    [whole] = actor(hf("qwen3_moe"), prefix_sharing="off").log_probs([given])
    assert torch.allclose(shared, whole, atol=1e-5)
    assert np.isfinite(whole.numpy()).all()
