"""The critic's loss: squared distance of its values from the returns, clipped around the values that the advantages were made with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.objective.tokens import MaskedTokens, Metrics
from services.trainer.packing import PackedBatch


@dataclass(frozen=True)
class ValueLoss:
    """``sum(weights max((V_clipped - R)^2, (V - R)^2))``, V clipped to ``[V_old - value_clip, V_old + value_clip]``.

    An instance is a ``Loss`` on values. The micro-batch carries fields ``values`` (V_old), ``returns`` (R) and ``weights``. There is no
    factor 1/2. Metrics: loss, value_loss, value_clipfrac (share of tokens whose clipped term is the larger).

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9; clipped as in OpenAI's implementation of it.
    """

    value_clip: float = 0.2

    def __call__(self, values: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        """See ``Loss``; ``values`` [T]: of the state in which ``batch.labels[t]`` is chosen. Raises MissingField; ValueError."""
        tokens = MaskedTokens(values, batch)
        old = tokens.field("values", "the clip of the value loss").detach()
        returns = tokens.field("returns", "the value loss").detach()
        current = tokens.log_probs  # here: values
        bounded = old + (current - old).clamp(-self.value_clip, self.value_clip)
        free_error, bounded_error = (current - returns).square(), (bounded - returns).square()
        loss = tokens.mean(torch.maximum(free_error, bounded_error))
        outside = (tokens.log_probs - old).abs() > self.value_clip  # inside, the two errors differ by rounding alone
        clipped = (outside & (bounded_error > free_error)).to(tokens.dtype)
        return loss, {"loss": loss.detach(), "value_loss": loss.detach(), "value_clipfrac": tokens.mean(clipped.detach())}
