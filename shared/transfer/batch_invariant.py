"""Matrix products and attention on a CPU whose every row is computed alike, whatever stands beside it.

A product's kernel is chosen by its shape: a token that an engine decodes alone goes through another one than the same token in a
trainer's pack, and the last bit differs. Here each product is made of products of one shape, `ROWS` rows at a time. Attention is computed
by blocks of `ROWS` queries and `KEYS` keys, their softmax's sums are added block by block from the first; keys that a query does not see
add exact zeros. Both sides of a run import this: equal weights and tokens give equal bits. Autograd works as before: what is replaced lies
below it, and attention is made of operations that it knows.
"""

import os
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.transfer import BATCH_INVARIANT

ROWS, KEYS, TERMS = 16, 64, 64
_installed: list[torch.library.Library] = []


def install() -> None:
    """Replaces the products and the scaled dot-product attention of this process, if `BATCH_INVARIANT` asks for it. Twice is once."""
    if _installed or not os.environ.get(BATCH_INVARIANT):
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that there was one before
        for name, function in (("mm", product), ("addmm", _biased), ("silu", _activated)):
            library.impl(name, function, "CPU")
    _installed.append(library)
    F.scaled_dot_product_attention = attend


def installed() -> bool:
    """Returns whether they are replaced."""
    return bool(_installed)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns ``left`` [M, K] times ``right`` [K, N]. K is filled up to a multiple of `TERMS`: SGLang pads layers' widths on a CPU."""
    if missing := -left.size(1) % TERMS:
        left, right = F.pad(left, (0, missing)), F.pad(right.t(), (0, missing)).t()  # as weights lie
    rows, found = left.size(0), left.new_empty(-(-left.size(0) // ROWS) * ROWS, right.size(1))
    padded = F.pad(left, (0, 0, 0, len(found) - rows)) if len(found) > rows else left.contiguous()
    for first in range(0, len(found), ROWS):
        torch.mm(padded[first : first + ROWS], right, out=found[first : first + ROWS])  # the overload that is not replaced
    return found[:rows]


def _biased(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * bias + alpha * product(left, right)


def _activated(values: Tensor) -> Tensor:
    """Returns silu of numbers that are all computed in vectors: PyTorch computes those that fill none with another function."""
    flat = F.pad(values.reshape(-1), (0, -values.numel() % TERMS))
    return torch.ops.aten.silu.out(flat, out=torch.empty_like(flat))[: values.numel()].view(values.shape)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns attention as PyTorch's function of that name does, of [n, heads, tokens, width]; masks are of bools."""
    assert not dropout_p
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.size(1) // tensor.size(1), 1) for tensor in (key, value))
    queries, keys = query.size(2), key.size(2)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen = seen.tril() if is_causal else seen if attn_mask is None else attn_mask
    seen = seen.expand(query.size(0), query.size(1), queries, keys)
    more, most = -queries % ROWS, -keys % KEYS
    query, seen = F.pad(query, (0, 0, 0, more)), F.pad(seen, (0, most, 0, more))
    key, value = (F.pad(tensor, (0, 0, 0, most)) for tensor in (key, value))
    shape, width = query.shape, query.size(3)
    scale = width**-0.5 if scale is None else scale
    blocks = (query * scale).reshape(-1, ROWS, width).flatten(1)  # [n heads blocks, ROWS width]
    count = shape[2] // ROWS
    totals: list[Tensor] = []
    scores = []
    for first in range(0, keys + most, KEYS):
        part = key[:, :, first : first + KEYS].flatten(0, 1).repeat_interleave(count, 0)
        found = torch.bmm(blocks.view(-1, ROWS, width), part.transpose(1, 2)).view(*shape[:3], KEYS)
        scores.append(found.masked_fill(~seen[..., first : first + KEYS], -torch.inf))
    highest = torch.stack([one.amax(-1) for one in scores]).amax(0).detach().clamp(min=-1e30)[..., None]
    for index, one in enumerate(scores):
        weights = (one - highest).exp()
        part = value[:, :, index * KEYS : (index + 1) * KEYS].flatten(0, 1).repeat_interleave(count, 0)
        summed = torch.bmm(weights.view(-1, ROWS, KEYS), part).view(*shape[:3], value.size(3))
        totals = [weights.sum(-1, keepdim=True), summed] if not totals else [totals[0] + weights.sum(-1, keepdim=True), totals[1] + summed]
    return (totals[1] / totals[0].clamp(min=torch.finfo(query.dtype).tiny))[:, :, :queries]
