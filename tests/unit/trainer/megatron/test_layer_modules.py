"""Layers' own modules, and a user's in the place of the family's."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from services.trainer.megatron.gpt_model import transformer_config
from services.trainer.megatron.spec import RMSNorm, named_spec
from shared.model.families import read_architecture
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import ConfigError
from tests.support.tables import not_refused, table
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import pack, sequences


@pytest.mark.parametrize("shape", [(5, 1, 24), (3, 4, 24), (7, 24)])
def test_equals_torch(shape):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(TransformerConfig(num_layers=1, hidden_size=24, num_attention_heads=1), 24, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(24, generator=generator))
    hidden = torch.randn(shape, generator=generator).requires_grad_()
    upstream = torch.randn(shape, generator=generator)
    expected = F.rms_norm(hidden, (24,), norm.weight, 1e-6)
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), (hidden, norm.weight))
    gradients = torch.autograd.grad((norm(hidden) * upstream).sum(), (hidden, norm.weight))
    torch.testing.assert_close(norm(hidden), expected)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_bfloat16_multiplies_with_the_weight_after_rounding():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype=torch.bfloat16, bf16=True)
    norm = RMSNorm(config, 8, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 8))
    hidden = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    wide = hidden.float()
    rounded = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    out = norm(hidden)
    assert out.dtype == torch.bfloat16 and torch.equal(out, norm.weight * rounded)
    (gradient,) = torch.autograd.grad(out.sum(), hidden)
    assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all()


@pytest.mark.parametrize("parallel", [True, False])
def test_the_weight_is_marked_for_sequence_parallelism(parallel):
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2, sequence_parallel=parallel)
    assert RMSNorm(config, 8).weight.sequence_parallel is parallel


# --- layers of a user's own module compute in the place of the family's, and what does not fit is refused in words

MODULE = "tests.unit.trainer.megatron.spec_layers"


@pytest.fixture
def own_norm():
    from tests.unit.trainer.megatron.spec_layers import OwnNorm

    OwnNorm.calls = 0
    return OwnNorm


@pytest.mark.parametrize(("kind", "name"), [("qwen3", "of_all_layers"), pytest.param("qwen3_moe", "of_a_stage", marks=pytest.mark.extra)])
def test_the_named_layers_are_those_of_the_model(kind, name, make_actor, own_norm):
    batch = [pack(sequences(4))]
    family = make_actor(kind)
    expected, steps = family.log_probs(batch)[0], rank_steps.steps(family, 1)
    assert own_norm.calls == 0
    named = make_actor(kind, spec=[MODULE, name])
    found = named.log_probs(batch)[0]
    assert own_norm.calls == 2  # one in each layer
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    (ours,), (theirs,) = rank_steps.steps(named, 1), steps
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-5) and ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-4)


def test_layers_of_another_model_are_refused(make_actor):
    cases = [
        (
            "qwen3",
            (MODULE, "without_query_norms"),
            ["trainer.spec", "parameters of qwen3", "layer 0 has no self_attention.q_layernorm.weight"],
        ),
        ("qwen3_moe", (MODULE, "of_megatron"), ["trainer.spec", "ReplayedLayer with a ReplayedMoELayer", "TransformerLayer with MoELayer"]),
        ("qwen2", (MODULE, "of_megatron"), ["trainer.spec", "parameters of qwen2", "layer 0 has"]),
    ]
    assert not not_refused(lambda kind, spec: make_actor(kind, spec=list(spec)), cases)


@table(
    ("name", "words"),
    [
        ("no_such", "cannot be imported.*no_such"),
        ("wants_more", "a function of args, config, vp_stage, architecture; it wants tokenizer"),
        ("breaks", "it raised RuntimeError: no layers today"),
        ("gives_a_word", "a ModuleSpec, or TransformerBlockSubmodules of 2 layers; it gives str"),
    ],
)
def test_a_name_that_gives_no_layers_is_refused(name, words, hf, make_actor):
    make_actor("qwen3")  # Megatron asks its groups how many layers a stage has
    architecture = read_architecture(hf("qwen3"))
    config = transformer_config(architecture, ParallelLayout(), torch.float32, {})
    with pytest.raises(ConfigError, match=f"trainer.spec.*{words}"):
        named_spec((MODULE, name), architecture, config, {})
