"""Sequences that share the computation of their beginnings: the same log-probs, losses and gradients as apart."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.megatron import passes
from services.trainer.megatron.packed_sequences import WORTHWHILE, least_saved, obstacle
from services.trainer.objective.loss import PolicyLoss
from services.trainer.packing import shared_prefixes
from shared.config.algorithm import AlgorithmSection
from shared.runtime.errors import ConfigError
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.rank_steps import actor, shared_step, tree, weighted_loss
from tests.unit.trainer.megatron.tiny import VOCAB, pack

APART, SHARED = None, 0.0
CLOSE = {"atol": 2e-5, "rtol": 1e-5}

CUT = st.tuples(st.integers(0, 1000), st.floats(0, 1), st.integers(1, 24))
TREES = st.tuples(st.integers(0, 1000), st.integers(1, 40), st.lists(CUT, min_size=1, max_size=9))


def grown(seed, first, cuts):
    """Sequences of a drawn tree: each forks from one before it, after a share of that one's tokens, and has some of its own."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randint(0, VOCAB, (first,), generator=generator)]
    for parent, share, own in cuts:
        before = found[parent % len(found)]
        found.append(torch.cat([before[: round(share * len(before))], torch.randint(0, VOCAB, (own,), generator=generator)]))
    return found


def computed(batch):
    return len(shared_prefixes(batch.tokens.numpy(), batch.cu_seqlens.tolist()).computed)


def gradients(model, batch, loss, need_entropy=False):
    model.model.zero_gradients()
    found, metrics = passes.forward_backward(model.model, [batch], loss, 1.0, need_entropy)
    named = {name: parameter.main_grad.clone() for chunk in model.model.chunks for name, parameter in chunk.named_parameters()}
    return found, metrics, named


def assert_alike(model, batch, loss, need_entropy=False):
    """Compares both ways of computing a loss; gradients by their norms, parameter by parameter."""
    model.model.least_saved = APART
    expected, metrics, apart = gradients(model, batch, loss, need_entropy)
    model.model.least_saved = SHARED
    found, found_metrics, shared = gradients(model, batch, loss, need_entropy)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert found_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    whole = torch.stack([gradient.norm() for gradient in apart.values()]).norm()
    for name, gradient in apart.items():
        assert (shared[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * whole, name


@pytest.fixture(scope="module")
def of_kind(hf):
    """A model of a kind, made once."""
    return cache(lambda kind: actor(hf(kind)))


FAMILIES = ("qwen3_moe", "gpt_oss", "llama3_rope", "gemma3_text", "glm4", "qwen3_moe_mixed", "moonlight")


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3", *(pytest.param(kind, marks=pytest.mark.extra) for kind in FAMILIES)])
def test_log_probs_and_gradients_are_those_of_the_sequences_apart(of_kind, kind):
    model = of_kind(kind)

    @settings(max_examples=12, deadline=None)
    @given(TREES)
    def check(drawn):
        batch = pack(grown(*drawn))
        model.model.least_saved = APART
        (apart,) = model.log_probs([batch])
        model.model.least_saved = SHARED
        (shared,) = model.log_probs([batch])
        torch.testing.assert_close(shared * batch.loss_mask, apart * batch.loss_mask, **CLOSE)
        assert_alike(model, batch, weighted_loss, need_entropy=True)

    check()


@pytest.mark.parametrize("estimator", ["gspo", "ppo"])
def test_objectives_see_each_sequence_whole(of_kind, estimator):
    """Ratios of whole sequences, weights and counts of tokens: what is shared is trained once for every sequence that trains it."""
    batch = pack(tree(4))
    place = torch.arange(batch.tokens.numel(), dtype=torch.float32)
    fields = {"weights": torch.sin(place).abs() / 100, "rollout_log_probs": -4 + torch.cos(place), "versions": (place % 2).int()}
    batch = batch.with_fields(**{name: values * batch.loss_mask.to(values.dtype) for name, values in fields.items()})
    assert_alike(of_kind("qwen3"), batch, PolicyLoss(AlgorithmSection(advantage_estimator=estimator), batch_version=1))


def test_losses_of_logits_and_of_candidates_get_those_of_every_sequence(of_kind):
    batch = pack(tree(5))
    batch = batch.with_fields(ids=(batch.labels[:, None] * 7 + torch.tensor([0, 1, 2])) % VOCAB)

    def of_candidates(log_probs, entropy, batch, found):
        return -(batch.loss_mask[:, None] * found * torch.tensor([1.0, 2.0, 3.0])).sum() / 100, {}

    def of_logits(given, batch):
        found = given.float()[:, :VOCAB].log_softmax(-1).gather(1, batch.fields["ids"])
        return of_candidates(found[:, 0], None, batch, found)

    of_candidates.candidates, of_logits.takes_logits = "ids", True
    assert_alike(of_kind("qwen3"), batch, of_candidates)
    assert_alike(of_kind("qwen3"), batch, of_logits)


def test_values_of_a_critic(hf):
    critic = actor(hf("qwen3"), role="critic")
    torch.nn.init.normal_(critic.model.modules[0].output_layer.weight)
    batch = pack(tree(6))
    critic.model.least_saved = APART
    (apart,) = critic.values([batch])
    critic.model.least_saved = SHARED
    (shared,) = critic.values([batch])
    torch.testing.assert_close(shared, apart, **CLOSE)


def test_only_what_is_not_shared_is_computed_and_auto_wants_a_tenth_saved(hf, alone):
    batches = [pack(tree(seed)) for seed in range(2)]
    everything = sum(batch.tokens.numel() for batch in batches)
    expected = sum(map(computed, batches))
    assert expected < (1 - WORTHWHILE) * everything
    assert alone.shared_step(hf("qwen3"), {"prefix_sharing": "off"})["computed"] == everything
    for setting in ("on", "auto"):
        assert alone.shared_step(hf("qwen3"), {"prefix_sharing": setting})["computed"] == expected
    model = alone.actor(hf("qwen3"))
    work = model.shared_work(batches)
    assert work.tokens == everything - expected
    begin = torch.arange(19)
    little = pack([torch.cat([begin[:4], begin[4:] + 20]), torch.cat([begin[:4], begin[4:] + 40])])  # 3 of 38 tokens
    assert computed(little) == 35 and model.shared_work([little]).tokens == 0
    model.model.least_saved = least_saved("on", model.model.config)
    assert model.shared_work([little]) == (3, 6)


TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "TP2 SP recompute": ("qwen3", {**TP2_SP, "recompute": True}),
    "PP2 attention recomputed": (
        "qwen3",
        {"pipeline_model_parallel_size": 2, "recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ),
    "EP2": ("qwen3_moe", {"expert_model_parallel_size": 2}),
    "latent attention, TP2 SP": ("deepseek_v3", TP2_SP),
    "CP2, which shares nothing": ("qwen3", {"context_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def apart(hf):
    """What one process makes of the sequences apart."""
    return cache(lambda kind: shared_step(hf(kind), {"prefix_sharing": "off"}))


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one == "TP2 SP recompute" else pytest.mark.extra) for one in LAYOUTS])
def test_layouts(name, hf, two_ranks, apart):
    kind, config = LAYOUTS[name]
    expected, ranks = apart(kind), two_ranks.run(rank_steps.shared_step, hf(kind), config)
    for rank in ranks:
        assert rank["step"].loss == pytest.approx(expected["step"].loss, abs=1e-5)
        assert rank["step"].grad_norm == pytest.approx(expected["step"].grad_norm, abs=1e-4)
        if len(rank["log_probs"]) == len(expected["log_probs"]):  # else the ranks have different sequences
            torch.testing.assert_close(rank["log_probs"], expected["log_probs"], atol=1e-4, rtol=1e-5)
        if "context_parallel_size" in config:
            assert 2 * rank["computed"] >= rank["tokens"], "two ranks compute all of them"
        else:  # of a pipeline's ranks the first embeds
            assert rank["computed"] < (1 - WORTHWHILE) * rank["tokens"]
    for name, tensor in ranks[0]["weights"].items():
        assert (tensor - expected["weights"][name]).abs().max() < 1e-4, name


def test_on_is_refused_where_it_would_not_be_exact(hf, two_ranks):
    for error in two_ranks.run(rank_steps.refused, hf("qwen3"), {"context_parallel_size": 2, "prefix_sharing": "on"}):
        assert "trainer.prefix_sharing" in error and "context parallelism" in error


def test_where_beginnings_are_shared(of_kind):
    config = of_kind("qwen3").model.config
    assert [least_saved(setting, config) for setting in ("auto", "on", "off")] == [WORTHWHILE, 0.0, None]
    config.transformer_impl = "transformer_engine"
    try:
        assert least_saved("auto", config) is None
        with pytest.raises(ConfigError, match="Transformer Engine"):
            least_saved("on", config)
    finally:
        config.transformer_impl = "local"
    assert least_saved("auto", config, drafts=True) is None and "draft layer" in str(obstacle(config, drafts=True))
