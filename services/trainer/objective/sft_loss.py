"""Supervised fine-tuning: the mean of -log p over the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.trainer.objective.tokens import MaskedTokens, Metrics
from services.trainer.packing import PackedBatch


@dataclass(frozen=True)
class SftLoss:
    """``-sum(weights log p)``; an instance is a ``Loss``.

    With weights of reducer ``token_mean`` it is the batch's mean over trained tokens, with ``rollout_mean`` the mean of
    the samples' means (slime's default for SFT too). Metrics: loss, and entropy_loss with an entropy.

    Source: maximum likelihood, the cross-entropy of next tokens.
    """

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        """See ``Loss``. Args: log_probs, entropy: [T], of ``batch.labels``. Raises MissingField; ValueError."""
        tokens = MaskedTokens(log_probs, batch)
        loss = tokens.mean(-tokens.log_probs)
        metrics = {"loss": loss.detach()}
        if entropy is not None:
            metrics["entropy_loss"] = tokens.mean(tokens.blank(entropy.detach()))
        return loss, metrics
