"""The kernels of `services.trainer.parallel.likelihood` on a GPU, which read each logit once forward and once backward. Triton, which comes
with torch for CUDA."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # Columns of a row that a program holds at a time


@triton.jit
def _statistics(logits, stride, width, scale, highest_of, total_of, weighted_of, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a row; the sums are rescaled whenever the highest x grows."""
    row = tl.program_id(0).to(tl.int64)
    highest, total, weighted = -float("inf"), 0.0, 0.0
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        real = columns < width
        x = tl.load(logits + row * stride + columns, mask=real, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(highest, tl.max(x, 0))
        lower = tl.where(total > 0, highest - higher, 0.0)
        factor = tl.exp(lower)
        weighted = factor * (weighted + lower * total)
        # x is rounded before it is the highest, and not in this difference, where the product may be fused: that is much far below 0
        shifted = tl.where(real, tl.minimum(x - higher, 0.0), 0.0)
        exponentials = tl.where(real, tl.exp(shifted), 0.0)
        total = factor * total + tl.sum(exponentials, 0)
        weighted += tl.sum(exponentials * shifted, 0)
        highest = higher
    tl.store(highest_of + row, highest)
    tl.store(total_of + row, total)
    tl.store(weighted_of + row, weighted)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, stride, width, scale, local, upstream, count, normalizer, total, entropy, for_entropy, WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a block of a row; it overwrites what it reads."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    at = logits + row * stride + columns
    log_p = tl.load(at, mask=real, other=0.0).to(tl.float32) * scale - tl.load(normalizer + row)
    factor = tl.zeros([BLOCK], tl.float32) + tl.load(total + row)
    if WITH_ENTROPY:
        factor += tl.load(for_entropy + row) * (log_p + tl.load(entropy + row))
    gradient = -tl.exp(log_p) * factor
    for index in range(0, count):
        column = tl.load(local + row * count + index)
        gradient += tl.where(columns == column, tl.load(upstream + row * count + index), 0.0)
    tl.store(at, (gradient * scale).to(logits.dtype.element_ty), mask=real)


def row_statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `likelihood.row_statistics`, always with the last sum. ``logits``: [n, width], its rows contiguous."""
    highest, total, weighted = torch.empty(3, logits.size(0), dtype=torch.float32, device=logits.device)
    if logits.size(0):
        kernel: Any = _statistics[(logits.size(0),)]
        kernel(logits, logits.stride(0), logits.size(1), 1 / temperature, highest, total, weighted, BLOCK=BLOCK, num_warps=8)
    return highest, total, weighted


def to_gradient(
    logits: Tensor,
    local: Tensor,
    normalizer: Tensor,
    for_log_probs: Tensor,
    total: Tensor,
    entropies: tuple[Tensor, Tensor] | None,
    temperature: float,
) -> None:
    """As `likelihood.to_gradient`. ``total``: the sums of ``for_log_probs`` over each row, [n]."""
    if not logits.size(0):
        return
    entropy, for_entropy = (total, total) if entropies is None else entropies
    kernel: Any = _gradient[(logits.size(0), triton.cdiv(logits.size(1), BLOCK))]
    kernel(
        logits,
        logits.stride(0),
        logits.size(1),
        1 / temperature,
        local.contiguous(),
        for_log_probs.float().contiguous(),
        local.size(1),
        normalizer.contiguous(),
        total.float().contiguous(),
        entropy.contiguous(),
        for_entropy.float().contiguous(),
        WITH_ENTROPY=entropies is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
