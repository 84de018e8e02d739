"""PyTorch's variable-length attention within each sequence of a pack, on a GPU in half precision."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.trainer.parallel.runtime import round_up

Lengths = tuple[Any, Any, int, int]  # starts of the sequences, for queries and keys, and the longest of both


@cache
def _kernel() -> tuple[Callable[..., Any], bool]:
    """Returns the kernel (torch >= 2.10), and whether it shares key/value heads; older ones want one for each query head."""
    from torch.nn.attention.varlen import varlen_attn  # registers CUDA operators

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float | None, window: int, sinks: Tensor | None = None
) -> Tensor:
    """Computes causal attention: ``query`` [T, heads, width], ``key`` and ``value`` [K, key/value heads, width].

    Args:
        scale: factor on the logits; None for ``width ** -0.5``. window: keys that a query sees, its own included; 0 for all.
        sinks: a logit of each head that joins its softmax.
    """
    kernel, shares_heads = _kernel()
    more: dict[str, Any] = {}
    if query.size(1) != key.size(1):
        if shares_heads:
            more["enable_gqa"] = True
        else:
            repeat = query.size(1) // key.size(1)
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    # the kernel wants one width, a multiple of 8: columns of zeros change no score, and come out as zeros
    padded = round_up(query.size(2), 8)
    given = [F.pad(tensor, (0, padded - tensor.size(2))).contiguous() for tensor in (query, key, value)]
    scale, left = query.size(2) ** -0.5 if scale is None else scale, window - 1
    if sinks is None:
        attended = kernel(*given, *lengths, scale=scale, window_size=(left, 0), **more)  # nothing ahead: causal
    else:
        attended = _WithSinks.apply(*given, sinks, lengths, scale, left)
    assert isinstance(attended, Tensor)
    return attended[..., : value.size(2)]


class _WithSinks(torch.autograd.Function):
    """Variable-length attention whose softmax has one more logit a head: the kernel's output, scaled by what the sink leaves of it.

    With the larger sum the kernel's backward pass computes the very gradients of queries, keys and values: the sink's value is zero.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, lengths: Any, scale: float, left: int) -> Tensor:
        options = {"scale": scale, "window_size_left": left, "window_size_right": 0}
        kernel = torch.ops.aten._flash_attention_forward
        output, lse, state, unused, _ = kernel(query, key, value, *lengths, 0.0, left < 0, False, **options)
        total = torch.logaddexp(lse, sinks.float()[:, None])  # [heads, T]
        output = (output * torch.exp(lse - total).T[..., None]).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, total, state, unused)
        ctx.lengths, ctx.options = lengths, options
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, total, state, unused = ctx.saved_tensors
        causal, gradient = ctx.options["window_size_left"] < 0, gradient.contiguous()
        kernel = torch.ops.aten._flash_attention_backward
        found = kernel(gradient, query, key, value, output, total, *ctx.lengths, 0.0, causal, state, unused, **ctx.options)
        along = (gradient.float() * output.float()).sum(-1).T
        of_sinks = -(torch.exp(sinks.float()[:, None] - total) * along).sum(1).to(sinks.dtype)
        return (*found, of_sinks, None, None, None)
