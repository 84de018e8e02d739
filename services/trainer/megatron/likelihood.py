"""Log-probabilities and entropies of a vocabulary that is split over the tensor-parallel ranks.

Each rank holds a slice of the logits, [T, V / ranks]; nothing of that size is ever gathered, and no float32 copy of it is
made: forward and backward work through chunks of rows and keep one float32 number per row. With x the logits divided by the
temperature, z = log Σ exp(x) and p = exp(x − z):

    log p_label = x_label − z          ∂/∂x_j = [j = label] − p_j
    H = z − Σ p_j x_j                  ∂/∂x_j = −p_j (log p_j + H)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 32 * 1024 * 1024
"""Logits worked on at a time: 128 MiB in float32."""


@dataclass(frozen=True)
class VocabularySlice:
    """This rank's part of the vocabulary.

    Args:
        group: the tensor-parallel group. start: id of the first local token. width: local tokens, without padding rows.
    """

    group: dist.ProcessGroup
    start: int
    width: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, rows: int, vocab_size: int) -> "VocabularySlice":
        """Makes this rank's slice. ``rows``: local logits a token, padding included; ``vocab_size``: the whole
        vocabulary without it."""
        start = group.rank() * rows
        return cls(group, start, max(0, min(rows, vocab_size - start)))


def log_probs_and_entropy(
    logits: Tensor, labels: Tensor, vocabulary: VocabularySlice, temperature: float, need_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probability of each label, and the entropy of each distribution, over the whole vocabulary.

    Args:
        logits: [T, rows], any floating dtype. labels: int64 [T], ids of the whole vocabulary.
        temperature: logits are divided by it. need_entropy: else None is returned in its place.

    Returns:
        float32 [T] each, the same on all ranks of the group, differentiable with respect to ``logits``.
    """
    log_probs, entropy = _VocabParallelLikelihood.apply(logits, labels, vocabulary, temperature, need_entropy)
    return log_probs, entropy if need_entropy else None


def candidate_log_probs(
    logits: Tensor, labels: Tensor, log_probs: Tensor, candidates: Tensor, vocabulary: VocabularySlice, temperature: float
) -> Tensor:
    """Returns the log-probabilities of several candidates for each label: float32 [T, C], differentiable.

    They follow from the label's: ``log p_c = log p_label + x_c - x_label``.

    Args:
        logits, labels, temperature: as `log_probs_and_entropy` takes them. log_probs: what that gave, [T]. candidates: int64 [T, C].
    """
    picked = _PickedLogits.apply(logits, torch.cat([candidates, labels[:, None]], 1), vocabulary) / temperature
    return log_probs[:, None] + picked[:, :-1] - picked[:, -1:]


class _PickedLogits(torch.autograd.Function):
    """Gathers logits [T, C] by ids of the whole vocabulary; each rank has some of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, vocabulary: VocabularySlice) -> Tensor:
        local = ids - vocabulary.start
        mine = (local >= 0) & (local < vocabulary.width)
        local = local.clamp(0, max(0, logits.size(1) - 1))
        picked = torch.where(mine, logits.gather(1, local).float(), 0.0)
        if vocabulary.group.size() > 1:
            dist.all_reduce(picked, group=vocabulary.group)
        ctx.save_for_backward(local, mine)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return picked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        local, mine = ctx.saved_tensors
        result = torch.zeros(ctx.shape, dtype=ctx.dtype, device=gradient.device)
        result.scatter_add_(1, local, torch.where(mine, gradient, 0.0).to(ctx.dtype))
        return result, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK_ELEMENTS // max(1, logits.size(1)))
    for first in range(0, logits.size(0), rows):
        yield slice(first, first + rows)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Returns a float32 copy to work on in place; ``float()`` would hand out the logits themselves where they are float32."""
    return logits.to(torch.float32, copy=True).div_(temperature)


class _VocabParallelLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocabulary: VocabularySlice, temperature: float, need_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        real = logits[:, : vocabulary.width]
        tokens, split = logits.size(0), vocabulary.group.size() > 1
        if vocabulary.width:
            highest = real.amax(1).float() / temperature
        else:
            highest = torch.full((tokens,), -torch.inf, device=logits.device)
        if split:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=vocabulary.group)
        local = labels - vocabulary.start
        mine = (local >= 0) & (local < vocabulary.width)
        local = local.clamp(0, max(0, vocabulary.width - 1))
        # rows: Σ exp(x - highest), x_label - highest, Σ exp(x - highest) (x - highest)
        sums = torch.zeros(3 if need_entropy else 2, tokens, device=logits.device)
        for rows in _chunks(real) if vocabulary.width else ():
            shifted = _scaled(real[rows], temperature).sub_(highest[rows, None])
            picked = shifted.gather(1, local[rows, None]).squeeze(1)
            sums[1, rows] = torch.where(mine[rows], picked, 0.0)
            if need_entropy:
                exponentials = shifted.exp()
                sums[2, rows] = (exponentials * shifted).sum(1)
            else:
                exponentials = shifted.exp_()
            sums[0, rows] = exponentials.sum(1)
        if split:
            dist.all_reduce(sums, group=vocabulary.group)
        log_sum = sums[0].log()
        log_probs = sums[1] - log_sum
        entropy = log_sum - sums[2] / sums[0] if need_entropy else log_probs.new_empty(0)
        ctx.save_for_backward(logits, local, mine, highest + log_sum, entropy)
        ctx.vocabulary, ctx.temperature, ctx.need_entropy = vocabulary, temperature, need_entropy
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        logits, local, mine, normalizer, entropy = ctx.saved_tensors
        for_log_probs, for_entropy = gradients
        result = torch.zeros_like(logits)
        real = logits[:, : ctx.vocabulary.width]
        for rows in _chunks(real) if ctx.vocabulary.width else ():
            log_p = _scaled(real[rows], ctx.temperature).sub_(normalizer[rows, None])
            p = log_p.exp()
            chunk = torch.zeros_like(p)
            if for_log_probs is not None:
                weight = for_log_probs[rows]
                chunk.addcmul_(p, weight[:, None], value=-1)
                chunk.scatter_add_(1, local[rows, None], torch.where(mine[rows], weight, 0.0)[:, None])
            if ctx.need_entropy and for_entropy is not None:
                chunk.addcmul_(p.mul_(log_p.add_(entropy[rows, None])), for_entropy[rows, None], value=-1)
            result[rows, : ctx.vocabulary.width] = chunk.div_(ctx.temperature)
        return result, None, None, None, None
