"""Correction for samples that another policy made: weights and sequence masks, never part of the gradient.

Behaviour policy: the engine's, log-probs as it gave them with the tokens. Proximal policy: the trainer's at batch
start. The decoupled objective clips around the proximal policy and weights by proximal over behaviour: Hilton et al.
2022 (arXiv:2110.00641, "Batch size-invariance for policy optimization", section 3), AReaL (arXiv:2505.24298).
All tensors are [T], finite everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.trainer.objective.config import Importance, ImportanceLevel
from services.trainer.objective.policy import ratio_of
from services.trainer.objective.sequence import sequence_mean, sequence_sum


class ImportanceWeight(NamedTuple):
    """weight: floats [T], detached. ratio: the same before its bounds. changed: bool [T], where they took effect."""

    weight: Tensor
    ratio: Tensor
    changed: Tensor


def importance_weight(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    rule: Importance = "tis",
    level: ImportanceLevel = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> ImportanceWeight:
    """``w = exp(proximal - behaviour)``, bounded.

    Args:
        proximal, behaviour: log-probs [T]. mask: bool [T]. cu_seqlens: int32 [S + 1].
        rule: ``tis`` clamps w to [low, high]; ``icepop`` keeps w inside [low, high] and makes it 0 outside.
        level: over what the log ratio is taken: each ``token``, the sum over a ``sequence``'s trained tokens, or their
            mean (``geometric``). Clamped to +-20 before ``exp``.

    Source: TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; IcePop, Ling
    team 2025 (arXiv:2510.18855); levels, MIS, Liu et al. 2025, "When speed kills stability".
    """
    log_ratio = (proximal - behaviour).detach()
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio * mask.to(log_ratio.dtype), cu_seqlens)
    elif level == "geometric":
        log_ratio = sequence_mean(log_ratio, mask, cu_seqlens)
    ratio = ratio_of(log_ratio)
    if rule == "tis":
        weight = ratio.clamp(low, high)
    else:
        weight = torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    return ImportanceWeight(weight, ratio, weight != ratio)


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
