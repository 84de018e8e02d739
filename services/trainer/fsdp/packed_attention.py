"""Causal attention within each sequence of a pack, as transformers calls its attention implementations.

It is registered there under `NAME`. On a GPU in half precision PyTorch's variable-length kernel does the work; elsewhere, scaled dot-product
attention does it sequence by sequence. No mask of T x T tokens is ever made.
"""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from shared.runtime.errors import MyxoError

NAME = "packed"


@dataclass(frozen=True)
class Sequences:
    """The sequences of a pack. ``starts``: of each, and T. ``cu_seqlens``: the same, int32 [S + 1] on the model's device."""

    starts: list[int]
    cu_seqlens: Tensor

    @property
    def longest(self) -> int:
        return max(stop - start for start, stop in zip(self.starts, self.starts[1:], strict=False))


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_sequences: Sequences | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Takes ``query`` [1, heads, T, width], ``key`` and ``value`` [1, key/value heads, T, width]. Returns [1, T, heads, width], and None.

    Args:
        packed_sequences: a model hands on to its layers what it is called with. It is an argument, since a layer may be computed again in
            the backward pass.

    Raises MyxoError: the model does not hand it on, or asks for what changes the result and is not implemented here (sinks, caps on the
        scores, a mask).
    """
    asked = [name for name in ("s_aux", "softcap") if options.get(name) is not None]
    if asked or attention_mask is not None or not getattr(module, "is_causal", True):
        raise MyxoError(f"attention {NAME!r} has no {', '.join(asked) or 'masks'}, which {type(module).__name__} asks for")
    sequences = packed_sequences
    if sequences is None:
        raise MyxoError(f"{type(module).__name__} does not say which sequences are packed")
    if query.is_cuda and query.dtype != torch.float32:
        return _by_kernel(query, key, value, sequences, scaling, sliding_window)[None], None
    outputs = []
    for start, stop in zip(sequences.starts, sequences.starts[1:], strict=False):
        q, k, v = (tensor[:, :, start:stop] for tensor in (query, key, value))
        seen = None
        if sliding_window is not None and stop - start > sliding_window:
            seen = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        gqa = q.size(1) != k.size(1)
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=gqa))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scaling: float | None, window: int | None) -> Tensor:
    varlen_attn, shares_heads = _varlen_kernel()
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    more: dict[str, Any] = {"enable_gqa": True} if shares_heads and q.size(1) != k.size(1) else {}
    if not shares_heads and (repeat := q.size(1) // k.size(1)) > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    padded = -(-q.size(2) // 8) * 8  # the kernel wants one width, a multiple of 8: columns of zeros change no score
    cu, longest = sequences.cu_seqlens, sequences.longest
    attended: Tensor = varlen_attn(
        *(F.pad(tensor, (0, padded - tensor.size(2))).contiguous() for tensor in (q, k, v)),
        cu,
        cu,
        longest,
        longest,
        scale=q.size(2) ** -0.5 if scaling is None else scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **more,
    )
    return attended[..., : v.size(2)]


@cache
def _varlen_kernel() -> tuple[Any, bool]:
    """Returns the kernel (torch >= 2.10), and whether it shares key/value heads."""
    from torch.nn.attention.varlen import varlen_attn  # registers CUDA operators

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
