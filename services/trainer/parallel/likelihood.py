"""Log-probabilities and entropies straight from hidden states, over a vocabulary that is split over the tensor-parallel ranks.

The output layer's product is taken for a chunk of tokens at a time, forward and again backward: logits exist for one chunk only, in the
model's dtype, and never in float32 for more. Each rank has a slice of the vocabulary, [chunk, V / ranks]; nothing of that size is gathered.
With x the logits divided by the temperature, z = log Σ exp(x), p = exp(x - z) and H the entropy:

    log p_i = x_i - z          ∂/∂x_j = [j = i] - p_j
    H = z - Σ p_j x_j          ∂/∂x_j = -p_j (log p_j + H)

The weight's gradient is summed over the chunks in float32, in Megatron's own gradient buffer where the weight has one.

Where a sampler kept some tokens alone (`Kept`), all is over these: the logits of the others are `NEVER`, so that p and the gradients are 0.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shared.schema.kept_tokens import Kept
from shared.transfer import batch_invariant

NEVER = -1e30  # The logit of a token that was not kept; finite, so that its probability times its logarithm is 0


@dataclass(frozen=True)
class VocabularySlice:
    """This rank's part of the vocabulary.

    Args:
        group: the ranks that share the vocabulary; None for this one alone. start: the first local
            token's id. width: local tokens, without padding rows.
        forbidden: ids that engines never sample, of the whole vocabulary: distributions are over the others.
    """

    group: dist.ProcessGroup | None
    start: int
    width: int
    forbidden: tuple[int, ...] = ()

    @classmethod
    def of(cls, group: dist.ProcessGroup, rows: int, vocab_size: int) -> "VocabularySlice":
        """Makes this rank's slice. ``rows``: local logits a token, padding included; ``vocab_size``: the whole
        vocabulary without it."""
        start = group.rank() * rows
        return cls(group, start, max(0, min(rows, vocab_size - start)))


@dataclass(frozen=True)
class OutputHead:
    """The output layer of this rank, applied by chunks.

    Args:
        weight: [rows, hidden size], this rank's rows, or the embedding's where they are tied.
        chunk_size: tokens whose logits exist at a time; -1 for all.
        reports_gradient: whether the weight must be handed a gradient even where the real one went to its buffer: Megatron starts to reduce
            a bucket once each of its parameters has got one.
        scale, cap: a logit of the model is cap * tanh(scale * product / cap), or scale * product without a cap.
    """

    weight: Tensor
    vocabulary: VocabularySlice
    chunk_size: int = -1
    reports_gradient: bool = False
    scale: float = 1.0
    cap: float | None = None

    def logits(self, inputs: Tensor) -> Tensor:
        """Returns all logits, [U, rows], in the model's dtype: for a loss function that asks for them."""
        return self.capped(F.linear(inputs, self.weight))

    def capped(self, product: Tensor) -> Tensor:
        """Returns the model's logits of the output layer's product, which may be the product itself."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """Returns the derivatives of logits by the product that they are made of."""
        return self.scale if self.cap is None else (1 - (logits / self.cap).square()) * self.scale

    def likelihood(
        self, inputs: Tensor, ids: Tensor, temperature: float, need_entropy: bool, kept: Kept | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probabilities of several tokens at each place, and the entropy of each distribution.

        Args:
            inputs: [U, hidden size], the same on all ranks of the group. ids: int64 [U, K], of the whole vocabulary.
            temperature: logits are divided by it. need_entropy: else None is returned in its place.
            kept: of U places, the tokens that the distributions are over; None: the whole vocabulary.

        Returns:
            float32 [U, K] and [U], the same on all ranks of the group, differentiable with respect to inputs and weight.
        """
        log_probs, entropy, _ = _ChunkedLikelihood.apply(inputs, self.weight, ids, self, temperature, need_entropy, kept)
        return log_probs, entropy if need_entropy else None

    def likelihood_and_best(self, inputs: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities as `likelihood` does, and whether each place's first id is the likeliest: float32 [U], 1 or 0."""
        log_probs, _, best = _ChunkedLikelihood.apply(inputs, self.weight, ids, self, temperature, False, None)
        return log_probs, best

    def chunks(self, tokens: int) -> list[slice]:
        size = max(1, tokens if self.chunk_size < 0 else self.chunk_size)
        return [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]


def restrict(logits: Tensor, kept: Kept | None, rows: slice, vocabulary: VocabularySlice) -> None:
    """Sets the logits of all tokens but the kept ones to `NEVER`, in place, at places that have some; those of forbidden ones everywhere.

    Args:
        logits: [n, this rank's tokens], of the places ``rows``, whose start and stop are given. kept: of all places; None does nothing.
    """
    for token in vocabulary.forbidden:
        if 0 <= token - vocabulary.start < vocabulary.width:
            logits[:, token - vocabulary.start] = NEVER
    if kept is None:
        return
    part = kept.part(rows.start, rows.stop)
    places, columns = np.repeat(np.arange(len(part.counts)), part.counts), part.ids.astype(np.int64) - vocabulary.start
    own = (columns >= 0) & (columns < vocabulary.width)
    at = torch.from_numpy(np.stack([places[own], columns[own]])).to(logits.device)
    values = logits[at[0], at[1]]
    logits.masked_fill_(torch.from_numpy(part.counts > 0).to(logits.device)[:, None], NEVER)
    logits[at[0], at[1]] = values


class _ChunkedLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, ids: Tensor, head: OutputHead, temperature: float, need_entropy: bool, kept: Kept | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        vocabulary, tokens = head.vocabulary, inputs.size(0)
        local = ids - vocabulary.start
        local = torch.where((local >= 0) & (local < vocabulary.width), local, -1)
        # of each token: the highest x, Σ exp(x - highest), Σ exp(x - highest) (x - highest); of this rank's slice
        highest, total, weighted, ordered = (torch.zeros(tokens, device=inputs.device) for _ in range(4))
        highest.fill_(-torch.inf)
        picked = torch.zeros(ids.shape, device=inputs.device)
        chunks, logits, slope = head.chunks(tokens), None, None
        for rows in chunks if vocabulary.width else ():
            logits = None  # the last chunk's go before this one's come
            logits = head.capped(F.linear(inputs[rows], weight))
            real = logits[:, : vocabulary.width]
            slope = head.slope(logits) if rows is chunks[-1] else None  # before tokens are taken out
            restrict(real, kept, rows, vocabulary)
            highest[rows], total[rows], weighted[rows] = row_statistics(real, temperature, need_entropy)
            if batch_invariant.installed():
                ordered[rows] = F.log_softmax(_scaled(real, temperature), 1).amax(1).neg()
            chosen = real.gather(1, local[rows].clamp(min=0)).float() / temperature
            picked[rows] = torch.where(local[rows] >= 0, chosen, 0.0)
        if vocabulary.group is not None and vocabulary.group.size() > 1:
            highest, total, weighted, picked = _over_ranks(vocabulary.group, highest, total, weighted, picked)
        log_sum = ordered if batch_invariant.installed() else total.log()  # summed in the order of an engine's log-softmax
        log_probs = (picked - highest[:, None]).sub_(log_sum[:, None])
        entropy = log_sum - weighted / total if need_entropy else log_probs.new_empty(0)
        # The last chunk's logits are kept: the backward pass begins with them, and a single chunk is not computed twice.
        ctx.kept = (logits, slope) if any(ctx.needs_input_grad[:2]) and logits is not None else None
        ctx.save_for_backward(inputs, weight, local, highest + log_sum, entropy)
        ctx.head, ctx.temperature, ctx.need_entropy, ctx.of_kept = head, temperature, need_entropy, kept
        best = (picked[:, 0] >= highest).float()
        ctx.mark_non_differentiable(best)
        return log_probs, entropy, best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        inputs, weight, local, normalizer, entropy = ctx.saved_tensors
        head, for_log_probs, for_entropy = ctx.head, gradients[0], gradients[1] if ctx.need_entropy else None
        kept, ctx.kept = ctx.kept, None  # it is overwritten
        if for_log_probs is None:
            for_log_probs = torch.zeros(local.shape, device=inputs.device)
        for_inputs = torch.zeros_like(inputs) if ctx.needs_input_grad[0] else None
        buffer = getattr(weight, "main_grad", None)
        for_weight = None
        if ctx.needs_input_grad[1]:
            for_weight = buffer if buffer is not None else torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in reversed(head.chunks(inputs.size(0)) if head.vocabulary.width else []):
            if kept is None:
                logits = head.capped(F.linear(inputs[rows], weight))
                slope = head.slope(logits)
                restrict(logits[:, : head.vocabulary.width], ctx.of_kept, rows, head.vocabulary)
            else:
                (logits, slope), kept = kept, None
            logits[:, head.vocabulary.width :] = 0
            to_gradient(
                logits[:, : head.vocabulary.width],
                local[rows],
                normalizer[rows],
                for_log_probs[rows],
                None if for_entropy is None else (entropy[rows], for_entropy[rows]),
                ctx.temperature,
            )
            if head.cap is not None or head.scale != 1.0:
                logits.mul_(slope)
            if for_inputs is not None:
                torch.mm(logits, weight, out=for_inputs[rows])
            if for_weight is not None:
                add_product(for_weight, logits.t(), inputs[rows])
            del logits
        return for_inputs, _reported(head, for_weight, buffer), None, None, None, None, None


def _reported(head: OutputHead, for_weight: Tensor | None, buffer: Tensor | None) -> Tensor | None:
    """Returns what autograd gets as the weight's gradient: nothing where the buffer has it, unless Megatron waits for something."""
    if for_weight is None or buffer is None:
        return None if for_weight is None else for_weight.to(head.weight.dtype)
    if not head.reports_gradient:
        return None
    head.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # zeros where the embedding's gradient is added to it, and the sum to the buffer
    return torch.zeros_like(head.weight) if getattr(head.weight, "zero_out_wgrad", False) else torch.empty_like(head.weight)


def _over_ranks(
    group: dist.ProcessGroup, highest: Tensor, total: Tensor, weighted: Tensor, picked: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole = highest.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    lower = highest - whole  # -inf on a rank that has padding only
    factor = lower.exp()
    weighted = torch.where(factor > 0, factor * (weighted + lower * total), 0.0)
    sums = torch.cat([torch.stack([total * factor, weighted], 1), picked], 1)
    dist.all_reduce(sums, group=group)
    return whole, sums[:, 0], sums[:, 1], sums[:, 2:]


def row_statistics(logits: Tensor, temperature: float, need_entropy: bool) -> tuple[Tensor, Tensor, Tensor | float]:
    """Returns for each row of logits [n, width], with x = logits / temperature: the highest x, Σ exp(x - highest), and, if asked for,
    Σ exp(x - highest) (x - highest); float32 [n]. One pass of a kernel on a GPU."""
    if logits.is_cuda:
        from services.trainer.parallel import likelihood_kernel

        return likelihood_kernel.row_statistics(logits, temperature)
    shifted = _scaled(logits, temperature)
    highest = shifted.amax(1)
    shifted.sub_(highest[:, None])
    if not need_entropy:
        return highest, shifted.exp_().sum(1), 0.0
    exponentials = shifted.exp()
    return highest, exponentials.sum(1), (exponentials * shifted).sum(1)


def to_gradient(
    logits: Tensor, local: Tensor, normalizer: Tensor, for_log_probs: Tensor, entropies: tuple[Tensor, Tensor] | None, temperature: float
) -> None:
    """Overwrites logits [n, width] with their gradient, computed in float32.

    Args:
        local: int64 [n, K], columns of the tokens; -1 for those of other ranks. normalizer: float32 [n], z.
        for_log_probs: [n, K], upstream. entropies: the entropies and their upstream gradients, [n] each; None for none.
    """
    total = for_log_probs.sum(1)
    if logits.is_cuda:
        from services.trainer.parallel import likelihood_kernel

        likelihood_kernel.to_gradient(logits, local, normalizer, for_log_probs, total, entropies, temperature)
        return
    log_p = _scaled(logits, temperature).sub_(normalizer[:, None])
    p = log_p.exp()
    gradient = p * -total[:, None]
    gradient.scatter_add_(1, local.clamp(min=0), torch.where(local >= 0, for_log_probs, 0.0))
    if entropies is not None:
        entropy, upstream = entropies
        gradient.addcmul_(p.mul_(log_p.add_(entropy[:, None])), upstream[:, None], value=-1)
    logits.copy_(gradient.div_(temperature))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Returns a float32 copy to work on in place; ``float()`` would hand out the logits themselves where they are float32."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a matrix product to a float32 matrix, in place; the product of bfloat16 matrices is not rounded before where the GPU can."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and _adds_wide():
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif left.is_cuda:
        total.add_(left @ right)
    else:
        total.addmm_(left.float(), right.float())


@cache
def _adds_wide() -> bool:
    """Returns whether this torch adds products of bfloat16 matrices to float32 ones, as cuBLAS can."""
    total, factor = torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())
