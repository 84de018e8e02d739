"""Sums over the sequences of a packed micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _SequenceTotal(torch.autograd.Function):
    """Every token gets the sum over its own sequence.

    As a matrix this is symmetric, so the backward pass is the same sum. Both are segmented reductions and gathers:
    unlike ``index_add``, whose CUDA kernel adds in any order, they give the same bits every time.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        return _spread(values, lengths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (lengths,) = ctx.saved_tensors
        return _spread(gradient.contiguous(), lengths), None


def _spread(values: Tensor, lengths: Tensor) -> Tensor:
    sums = torch.segment_reduce(values, "sum", lengths=lengths, axis=0)
    return torch.repeat_interleave(sums, lengths, output_size=values.shape[0])


_total: Callable[[Tensor, Tensor], Tensor] = _SequenceTotal.apply


def sequence_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of ``values`` [T] over each sequence, given to every token of it: [T]. Differentiable."""
    return _total(values, cu_seqlens.diff().long())


def sequence_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``sum m x / max(sum m, 1)`` over each sequence, given to every token of it: [T].

    Args:
        values: floats [T], finite wherever the mask is 0 too. mask: bool [T]. cu_seqlens: int32 [S + 1].
    """
    counted = mask.to(values.dtype)
    return sequence_sum(values * counted, cu_seqlens) / sequence_sum(counted, cu_seqlens).clamp(min=1.0)
