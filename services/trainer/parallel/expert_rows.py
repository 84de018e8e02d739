"""Rows of tokens in the order of their experts, and tokens as sums of their rows: each is the backward pass of the other."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rows_of_tokens(hidden: Tensor, tokens: Tensor, rows: Tensor, valid: Tensor | None = None) -> Tensor:
    """Returns rows [R, H] of tokens [N, H].

    Args:
        tokens: int64 [R], the token of each row. rows: int64 [N, K], the rows of each token, of which ``valid`` count; all if None.
    """
    found: Tensor = _Rows.apply(hidden, tokens, rows, valid)
    return found


def sums_of_rows(ordered: Tensor, tokens: Tensor, rows: Tensor, valid: Tensor | None = None) -> Tensor:
    """Returns tokens [N, H], each the sum of its rows of [R, H]. The other arguments are those of `rows_of_tokens`."""
    found: Tensor = _RowSums.apply(ordered, tokens, rows, valid)
    return found


def _sums(ordered: Tensor, rows: Tensor, valid: Tensor | None) -> Tensor:
    factors = None if valid is None else valid.to(ordered.dtype)
    if ordered.is_cuda:  # in one kernel, which adds in float32
        return F.embedding_bag(rows, ordered, mode="sum", per_sample_weights=factors)
    found = ordered.index_select(0, rows.reshape(-1)).view(*rows.shape, -1)
    return (found if factors is None else found * factors[..., None]).sum(1)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tokens: Tensor, rows: Tensor, valid: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, valid)
        return hidden.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _sums(gradient.contiguous(), *ctx.saved_tensors), None, None, None


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ordered: Tensor, tokens: Tensor, rows: Tensor, valid: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sums(ordered, rows, valid)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        return gradient.index_select(0, tokens), None, None, None
