"""What is kept out of the loss altogether, because it lies too far from the policy. Denominators stay as they were."""

from __future__ import annotations

from torch import Tensor

from services.trainer.objective.policy_gradient import ratio_of
from services.trainer.objective.sequence import sequence_mean, sequence_sum


def within(ratio: Tensor, low: float, high: float) -> Tensor:
    """True [T] where the loss stays: the ratio (of its level, ``level_ratio``) lies inside [low, high].

    Source: rejection sampling of MIS, Liu et al. 2025, "When speed kills stability".
    """
    return (ratio >= low) & (ratio <= high)


def vetoed(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, threshold: float) -> Tensor:
    """True [T] on every token of a sequence one of whose trained tokens has a ratio below the threshold: the trainer's policy would hardly
    ever have drawn it. Source: MIS, as above."""
    below = mask & (ratio_of(log_ratio.detach()) < threshold)
    return sequence_sum(below.to(log_ratio.dtype), cu_seqlens) > 0


def off_policy_sequence_mask(
    log_probs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor, delta: float
) -> Tensor:
    """True [T] where the loss stays: unless A < 0 and the sequence's mean of ``behaviour - log_probs`` is above delta.

    Args:
        log_probs: of the policy being trained [T]. behaviour: the rollout's [T]. delta: nats per token.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, off-policy sequence masking. As there, the distance is from
    the engine's own log-probs, so that it holds both staleness and the engine's mismatch (slime: from its old
    log-probs, which are the trainer's unless told otherwise).
    """
    distance = sequence_mean((behaviour - log_probs).detach(), mask, cu_seqlens)
    return ~((advantages < 0) & (distance > delta))
