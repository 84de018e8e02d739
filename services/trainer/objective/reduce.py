"""The reduction of tokens' losses to one number: one weight per sample, from the whole batch before it is packed; and masked tokens.

With ``weights[t] = w_sample * mask[t]`` the loss of a micro-batch is ``sum(weights * x)``, and the batch's loss is the plain sum over
micro-batches and data-parallel ranks, whatever the split. The denominators are those of the mask as it came: sequence masks and zero
importance weights do not change them.

Source: per rollout, GRPO (arXiv:2402.03300), eq. 3; per token, DAPO (arXiv:2503.14476), eq. 8; by a fixed length, Dr.GRPO, Liu et al. 2025
(arXiv:2503.20783).
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.trainer.packing import PackedBatch
from shared.config.algorithm import AlgorithmSection, Reducer
from shared.runtime.errors import MyxoError

FloatArray = npt.NDArray[np.float64]


def rollout_parts(trained_tokens: npt.ArrayLike, rollout_ids: Sequence[Hashable]) -> FloatArray:
    """Returns what part of its rollout each of a batch's samples is: by trained tokens, or alike in a rollout of which none is: [N].

    Args:
        trained_tokens: sum of the mask of each sample, all ranks together. rollout_ids: samples that fan out of one rollout share its id.
    """
    counts, samples, whole = np.asarray(trained_tokens, np.float64).tolist(), Counter(rollout_ids), Counter[Hashable]()
    for rollout, count in zip(rollout_ids, counts, strict=True):
        whole[rollout] += count
    pairs = zip(rollout_ids, counts, strict=True)
    return np.array([count / whole[rollout] if whole[rollout] else 1 / samples[rollout] for rollout, count in pairs])


def sample_weights(
    trained_tokens: npt.ArrayLike, parts: npt.ArrayLike, reducer: Reducer = "rollout_mean", fixed_length: int | None = None
) -> FloatArray:
    """Returns the weight of each trained token of each sample of one optimizer step: float64 [M].

    Args:
        trained_tokens, parts: of each of the M samples, all ranks together: as `rollout_parts` takes and gives them for the whole batch.
        reducer: ``rollout_mean``: ``1 / (G tokens of the rollout)`` for G rollouts; ``token_mean``:
            ``1 / max(tokens of all samples, 1)``; ``fixed_length``: ``1 / (G fixed_length)``.
    """
    counts, divisor = np.asarray(trained_tokens, np.float64), denominator(trained_tokens, parts, reducer)
    if reducer == "rollout_mean":
        return np.asarray(parts / np.maximum(counts, 1) / divisor)
    return np.full(counts.shape, 1.0 / divisor / (1 if reducer == "token_mean" else cast(int, fixed_length)))  # which this reducer has


def denominator(trained_tokens: npt.ArrayLike, parts: npt.ArrayLike, reducer: Reducer = "rollout_mean") -> float:
    """Returns the divisor of a sum over one optimizer step's samples: its rollouts, or with ``token_mean`` its trained tokens.

    A rollout that several steps divide counts in each by the part that is there. A sample of which nothing is trained, such as one that a
    filter removed, counts no token; a rollout of such samples alone counts as a rollout, as in slime.
    """
    if reducer == "token_mean":  # slime counts one token for a sample without any, which makes the mean smaller than that of the tokens
        return float(max(np.sum(trained_tokens), 1))
    return math.fsum(np.asarray(parts)) or 1.0  # of a rejection that nothing passes there is none


def passing(config: AlgorithmSection, rewards: Sequence[float]) -> npt.NDArray[np.bool_]:
    """Returns a mask of the samples of a batch that are trained: bool [N].

    All of them, but for ``sft_loss``: those with a reward above ``rejection_threshold``. The others are to be left out before weights are
    made, so that the loss is the mean over those that pass.

    Source: rejection sampling fine-tuning, Yuan et al. 2023 (arXiv:2308.01825); RAFT, Dong et al. 2023 (arXiv:2304.06767).
    """
    values = np.asarray(rewards, dtype=np.float64)
    return values > config.rejection_threshold if config.loss_type == "sft_loss" else np.ones(values.shape, dtype=bool)


Metrics = dict[str, Tensor]


class MissingField(MyxoError):
    """A loss needs a per-token field that its micro-batch does not carry.

    Args:
        field: its name. present: the micro-batch's fields.
    """

    def __init__(self, field: str, present: Mapping[str, Tensor]) -> None:
        self.field = field
        super().__init__(f"the micro-batch has no {field}, which the objective needs; it has {sorted(present)}")


class MaskedTokens:
    """The trained tokens of a micro-batch: everything read through it is blank where the mask is 0.

    ``torch.where`` and not a product, because 0 times NaN is NaN, forwards and backwards.
    """

    def __init__(self, log_probs: Tensor, batch: PackedBatch) -> None:
        self.batch = batch
        self.mask = batch.loss_mask > 0
        self.dtype = torch.promote_types(log_probs.dtype, torch.float32)
        self.log_probs = self.blank(log_probs)
        self.weights = self.field("weights")

    def blank(self, values: Tensor) -> Tensor:
        """Returns ``values`` [T] in the loss's dtype, 0 where the mask is 0."""
        return torch.where(self.mask, values.to(self.dtype), 0.0)

    def field(self, name: str) -> Tensor:
        """Returns field ``name`` [T], 0 where the mask is 0, without gradient. Raises MissingField."""
        if name not in self.batch.fields:
            raise MissingField(name, self.batch.fields)
        return self.blank(self.batch.fields[name]).detach()

    def mean(self, values: Tensor) -> Tensor:
        """Returns this micro-batch's part of the batch's mean: ``sum(weights * values)``."""
        return (self.weights * values).sum()

    def fraction(self, mask: Tensor) -> Tensor:
        """Returns the same of a bool mask [T]: the part of the tokens where it is true."""
        return self.mean(mask.to(self.dtype))


class _SequenceTotal(torch.autograd.Function):
    """Gives every token the sum over its own sequence.

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
    """Returns the sum of ``values`` [T] over each sequence, on every token of it: [T]. Differentiable."""
    return _total(values, cu_seqlens.diff().long())


def sequence_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns ``sum m x / max(sum m, 1)`` over each sequence, on every token of it: [T].

    Args:
        values: floats [T], finite wherever the mask is 0 too. mask: bool [T]. cu_seqlens: int32 [S + 1].
    """
    counted = mask.to(values.dtype)
    return sequence_sum(values * counted, cu_seqlens) / sequence_sum(counted, cu_seqlens).clamp(min=1.0)
