"""The RMS norm against torch's, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from services.trainer.megatron.spec import RMSNorm


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
