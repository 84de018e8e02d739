"""Attention on a GPU: packs of long and short sequences against a float32 reference.

By hand: ``PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -c /dev/null --noconftest tests/gpu``.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

HEADS, GROUPS, WIDTH = 8, 2, 128


@pytest.mark.parametrize("lengths", [[2048], [300, 2500, 17, 40, 4096, 2, 3000], [5, 700, 64]], ids=["one long", "mixed", "short"])
def test_packs_equal_the_reference(lengths: list[int]) -> None:
    from services.trainer.megatron.attention import PackedCausalAttention
    from services.trainer.megatron.packed_sequences import PackedSequences, long_sequences

    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    generator = torch.Generator(device="cuda").manual_seed(1)
    wide = [torch.randn(starts[-1], heads, WIDTH, device="cuda", generator=generator) for heads in (HEADS, GROUPS, GROUPS)]
    upstream = torch.randn(starts[-1], HEADS * WIDTH, device="cuda", generator=generator)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device="cuda")
    sequences = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        long=long_sequences(starts, torch.device("cuda")),
    )
    module = PackedCausalAttention.__new__(PackedCausalAttention)
    torch.nn.Module.__init__(module)
    module.scale, module.dense = None, False

    narrow = [tensor.bfloat16().requires_grad_() for tensor in wide]
    output = module(*narrow, packed_seq_params=sequences)
    output.backward(upstream.bfloat16())
    exact = [tensor.bfloat16().float().requires_grad_() for tensor in wide]
    expected = reference(*exact, starts)
    expected.backward(upstream.bfloat16().float())
    assert relative(output, expected) < 1e-2
    for ours, theirs in zip(narrow, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative(ours.grad, theirs.grad) < 2e-2


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: list[int]) -> torch.Tensor:
    """Sequence by sequence, in float32."""
    outputs = []
    for start, stop in pairwise(starts):
        q, k, v = (tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs).norm() / theirs.norm())
