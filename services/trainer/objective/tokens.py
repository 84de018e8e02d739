"""The masked fields of a micro-batch, which every loss reads, and sums over the sequences of a packed one."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from services.trainer.packing import PackedBatch
from shared.runtime.errors import MyxoError

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
