"""Long sequences of a pack for cuDNN's attention, a kernel without packs that is about twice as fast on a Hopper GPU.

It takes dense tensors, and builds a plan for every shape that it has not seen. So each long sequence goes through it alone, padded to a
multiple of `GRID` tokens: few shapes, and under a causal mask no token sees the padding behind it. The others stay with
the variable-length kernel. Measured on an H200 (by `benchmarks/trainer_mfu.py`): 8,192 tokens, forward and backward, 471
against 246 TFLOP/s.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

LONG = 2048
"""Tokens from which a sequence counts as long."""

GRID = 256

WIDEST_HEAD = 128
"""The widest heads that cuDNN takes in every version."""


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

    more: dict[str, Any] = {"enable_gqa": query.size(1) != key.size(1)}
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        attended = F.scaled_dot_product_attention(dense(query), dense(key), dense(value), is_causal=True, scale=scale, **more)
    return attended[0].transpose(0, 1)[:length]
