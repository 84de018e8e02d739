"""PyTorch's variable-length attention within each sequence of a pack, on a GPU in half precision.

Long sequences on a GPU go through cuDNN's attention, a kernel without packs that is about twice as fast on a Hopper GPU. It takes dense
tensors, and builds a plan for every shape that it has not seen. So each long sequence goes through it alone, padded to a multiple of
`GRID` tokens: few shapes, and under a causal mask no token sees the padding behind it. Measured on an H200 (by
`benchmarks/trainer_mfu.py`): 8,192 tokens, forward and backward, 471 against 246 TFLOP/s.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from services.trainer.parallel.runtime import round_up

GRID = 256
WIDEST_HEAD = 128  # the widest heads that cuDNN takes in every version
LONG = 2048  # Tokens from which a sequence counts as long on a GPU

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


@dataclass(frozen=True)
class LongSequences:
    """A pack that has long sequences.

    Args:
        runs: the pack from end to end, as (start, stop, long): each long sequence alone, the others between them together.
        cu_short: int32, where the other sequences begin, laid end to end; None where there are none. longest_short: tokens.
    """

    runs: tuple[tuple[int, int, bool], ...]
    cu_short: Tensor | None
    longest_short: int


def long_sequences(starts: list[int], device: torch.device) -> LongSequences | None:
    """Returns the plan for sequences that begin at ``starts``, whose last entry is T; None where none is long."""
    runs: list[tuple[int, int, bool]] = []
    short: list[int] = []
    for start, stop in pairwise(starts):
        is_long = stop - start >= LONG
        if not is_long:
            short.append(stop - start)
            if runs and not runs[-1][2]:
                start = runs.pop()[0]
        runs.append((start, stop, is_long))
    if not any(is_long for _, _, is_long in runs):
        return None
    bounds = torch.tensor([0, *short]).cumsum(0).int().to(device) if short else None
    return LongSequences(tuple(runs), bounds, max(short, default=0))


def by_length(query: Tensor, key: Tensor, value: Tensor, found: LongSequences, scale: float | None) -> Tensor:
    """Attends to long sequences one by one, and to the others together; the arguments are those of `varlen`."""
    parts = [tensor.split([stop - start for start, stop, _ in found.runs]) for tensor in (query, key, value)]
    runs = list(zip(*parts, strict=True))
    short = [run for run, (_, _, is_long) in zip(runs, found.runs, strict=True) if not is_long]
    others: list[Tensor] = []
    if found.cu_short is not None:
        q, k, v = (torch.cat(tensors) for tensors in zip(*short, strict=True))
        lengths = (found.cu_short, found.cu_short, found.longest_short, found.longest_short)
        others = list(varlen(q, k, v, lengths, scale, 0).split([len(run[0]) for run in short]))
    outputs = [
        attend_long(q, k, v, scale) if is_long else others.pop(0) for (q, k, v), (_, _, is_long) in zip(runs, found.runs, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def fits(query: Tensor, value: Tensor) -> bool:
    """Returns whether the heads are of a kind that the kernel takes: [T, heads, width]."""
    return query.size(2) == value.size(2) <= WIDEST_HEAD and query.size(2) % 8 == 0


def attend_long(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Computes causal attention within one sequence: ``query`` [T, heads, width], ``key`` and ``value`` [T, key/value heads, width]."""
    length = query.size(0)
    missing = -length % GRID

    def dense(tensor: Tensor) -> Tensor:
        padded = F.pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor
        return padded.transpose(0, 1)[None]

    gqa = query.size(1) != key.size(1)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        attended = F.scaled_dot_product_attention(dense(query), dense(key), dense(value), is_causal=True, scale=scale, enable_gqa=gqa)
    return attended[0].transpose(0, 1)[:length]
