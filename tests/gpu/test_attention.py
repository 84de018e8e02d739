"""Attention on a GPU: packs of long and short sequences against a float32 reference.

By hand: ``PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -c /dev/null --noconftest tests/gpu``.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

HEADS, GROUPS, WIDTH = 8, 2, 128


def attention(window: int = 0, sinks: bool = False) -> Any:
    from services.trainer.megatron.attention import PackedCausalAttention

    module = PackedCausalAttention.__new__(PackedCausalAttention)
    torch.nn.Module.__init__(module)
    module.scale, module.dense, module.window, module.softmax_offset = None, False, window, None
    if sinks:
        module.softmax_offset = torch.nn.Parameter(torch.linspace(-2, 3, HEADS, dtype=torch.bfloat16, device="cuda"))
    return module


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (128, False), (0, True), (128, True)])
@pytest.mark.parametrize("lengths", [[2048], [300, 2500, 17, 40, 4096, 2, 3000], [5, 700, 64]], ids=["one long", "mixed", "short"])
def test_packs_equal_the_reference(lengths: list[int], window: int, sinks: bool) -> None:
    from services.trainer.megatron.packed_sequences import PackedSequences
    from services.trainer.parallel.varlen_attention import long_sequences

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
    module = attention(window, sinks)

    narrow = [tensor.bfloat16().requires_grad_() for tensor in wide]
    output = module(*narrow, packed_seq_params=sequences)
    output.backward(upstream.bfloat16())
    exact = [tensor.bfloat16().float().requires_grad_() for tensor in wide]
    offset = module.softmax_offset.detach().float().requires_grad_() if sinks else None
    expected = reference(*exact, starts, window, offset)
    expected.backward(upstream.bfloat16().float())
    assert relative(output, expected) < 1e-2
    for ours, theirs in zip(narrow, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative(ours.grad, theirs.grad) < 2e-2
    assert offset is None or relative(module.softmax_offset.grad, offset.grad) < 2e-2


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: list[int], window: int = 0, offset: torch.Tensor | None = None
) -> torch.Tensor:
    """Sequence by sequence, in float32."""
    outputs = []
    for start, stop in pairwise(starts):
        q, k, v = (tensor[start:stop].transpose(0, 1) for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(HEADS // GROUPS, 0) for tensor in (k, v))
        seen = torch.ones(stop - start, stop - start, device=q.device).tril()
        seen = seen.triu(1 - window) if window else seen
        scores = (q @ k.mT * WIDTH**-0.5).masked_fill(seen == 0, -torch.inf)
        if offset is not None:
            scores = torch.cat([scores, offset[:, None, None].expand(-1, stop - start, 1)], -1)
        outputs.append((scores.softmax(-1)[..., : stop - start] @ v).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs).norm() / theirs.norm())


def test_shared_beginnings_equal_the_reference() -> None:
    """Forks of a long sequence, of a short one, and of forks."""
    from services.trainer.megatron.packed_sequences import model_input
    from services.trainer.packing import shared_prefixes
    from shared.model.parallel_layout import ParallelLayout
    from tests.unit.trainer.megatron.tiny import pack

    generator = torch.Generator().manual_seed(2)

    def fork(before: torch.Tensor, kept: int, own: int) -> torch.Tensor:
        return torch.cat([before[:kept], torch.randint(0, 1000, (own,), generator=generator)])

    first, other = (torch.randint(0, 1000, (length,), generator=generator) for length in (2500, 40))
    second = fork(first, 2100, 700)
    batch = pack([first, other, second, fork(second, 2600, 3), fork(first, 100, 50), fork(other, 40, 300), first.clone()])
    given = model_input(batch, ParallelLayout(), dense=False, device=torch.device("cuda"), least_saved=0.1)
    found = shared_prefixes(batch.tokens.numpy(), batch.cu_seqlens.tolist())
    assert given.back is not None and given.tokens.numel() == len(found.computed) < 0.5 * batch.tokens.numel()
    module = attention()
    wide = [torch.randn(len(found.computed), heads, WIDTH, generator=generator).cuda() for heads in (HEADS, GROUPS, GROUPS)]
    upstream = torch.randn(len(found.computed), HEADS * WIDTH, generator=generator).cuda()
    narrow = [tensor.bfloat16().requires_grad_() for tensor in wide]
    output = module(*narrow, packed_seq_params=given.sequences)
    output.backward(upstream.bfloat16())
    exact = [tensor.bfloat16().float().requires_grad_() for tensor in wide]
    apart = reference(*(tensor[given.back] for tensor in exact), batch.cu_seqlens.tolist())
    expected = apart[torch.from_numpy(found.computed).cuda()]
    expected.backward(upstream.bfloat16().float())
    assert relative(output, expected) < 1e-2
    for ours, theirs in zip(narrow, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative(ours.grad, theirs.grad) < 2e-2


@pytest.mark.parametrize(("dtype", "close"), [("float32", 3e-5), ("bfloat16", 0.1)])
def test_a_model_trains_shared_beginnings_as_whole_sequences(tmp_path: Path, dtype: str, close: float) -> None:
    from services.trainer.megatron import passes
    from services.trainer.parallel import runtime
    from tests.unit.trainer.megatron.rank_steps import actor, tree, weighted_loss
    from tests.unit.trainer.megatron.tiny import make_checkpoint, pack

    make_checkpoint("qwen3_moe" if dtype == "float32" else "qwen3", tmp_path)  # experts that rounding chooses differ by whole tokens
    model, batch = actor(tmp_path, train_dtype=dtype), pack(tree(3))
    found = []
    for least in (None, 0.0):
        model.model.least_saved = least
        log_probs = model.log_probs([batch])[0].cpu() * batch.loss_mask
        model.model.zero_gradients()
        passes.forward_backward(model.model, [batch], weighted_loss, 1.0, True)
        gradients = [parameter.main_grad.flatten() for chunk in model.model.chunks for parameter in chunk.parameters()]
        found.append((log_probs, torch.cat(gradients).clone()))
    runtime.stop()
    assert (found[0][0] - found[1][0]).abs().max() < close
    assert relative(found[1][1], found[0][1]) < close
