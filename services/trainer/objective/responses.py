"""A micro-batch as slime's functions see it: for each sample the numbers of its response, and all of them end to end.

A packed micro-batch does not say where a prompt ends: a response is taken to begin with its first trained token. That of a sample without
trained tokens is empty.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from services.trainer.packing import PackedBatch


class Responses:
    """Sum of R over the S samples: F.

    total_lengths, response_lengths: ints [S]. loss_masks: [R] of each, floats.
    """

    def __init__(self, batch: PackedBatch) -> None:
        starts = batch.cu_seqlens.tolist()
        first = [_first_trained(batch.loss_mask, start, end) for start, end in pairwise(starts)]
        self.total_lengths = [end - start for start, end in pairwise(starts)]
        self.response_lengths = [end - 1 - at for at, end in zip(first, starts[1:], strict=True)]
        spans = [torch.arange(at, end - 1) for at, end in zip(first, starts[1:], strict=True)]
        self._places = torch.cat(spans).to(batch.loss_mask.device)
        self._size = int(starts[-1])
        self.loss_masks = self.lists(batch.loss_mask)

    def flat(self, values: Tensor) -> Tensor:
        """Of [T] the responses', end to end: [F]. Differentiable."""
        return values[self._places]

    def lists(self, values: Tensor) -> list[Tensor]:
        """Of [T] the response of each sample: [R] each. Differentiable."""
        return list(self.flat(values).split(self.response_lengths))

    def packed(self, values: Tensor) -> Tensor:
        """[F] back in its places, 0 elsewhere: [T]. Differentiable."""
        return values.new_zeros(self._size).index_copy(0, self._places, values)

    @property
    def size(self) -> int:
        """F."""
        return int(self._places.numel())


def _first_trained(mask: Tensor, start: int, end: int) -> int:
    trained = torch.nonzero(mask[start : end - 1]).flatten()
    return start + int(trained[0]) if trained.numel() else end - 1
