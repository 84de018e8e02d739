"""Importance weights: proximal over behaviour, on the level of tokens or of sequences, bounded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.trainer.objective.policy_gradient import ratio_of
from services.trainer.objective.sequence import sequence_mean, sequence_sum
from shared.config.algorithm import Level, WeightBounding


class ImportanceWeight(NamedTuple):
    """weight: floats [T], detached. ratio: the same before its bounds. changed: bool [T], where they took effect."""

    weight: Tensor
    ratio: Tensor
    changed: Tensor


def level_ratio(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, level: Level) -> Tensor:
    """The ratio of each token (``token``), or on every token of a sequence that of its trained tokens together (``sequence``), or its
    geometric mean over them (``geometric``): [T], detached. Log ratios are clamped to +-20 before ``exp``.

    Source: MIS, Liu et al. 2025, "When speed kills stability"; the geometric mean, GSPO (arXiv:2507.18071).
    """
    log_ratio = log_ratio.detach()
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio * mask.to(log_ratio.dtype), cu_seqlens)
    elif level == "geometric":
        log_ratio = sequence_mean(log_ratio, mask, cu_seqlens)
    return ratio_of(log_ratio)


def importance_weight(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: WeightBounding = "clip",
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> ImportanceWeight:
    """``w = exp(proximal - behaviour)``, bounded.

    Args:
        proximal, behaviour: log-probs [T]. mask: bool [T]. cu_seqlens: int32 [S + 1].
        mode: ``truncate`` bounds w by high, ``clip`` by low and high, ``mask`` keeps w inside [low, high] and makes it 0 outside.
        level: see `level_ratio`.

    Source: TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; mask, IcePop, Ling
    team 2025 (arXiv:2510.18855).
    """
    ratio = level_ratio(proximal - behaviour, mask, cu_seqlens, level)
    if mode == "mask":
        weight = torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    else:
        weight = ratio.clamp(min=low if mode == "clip" else None, max=high)
    return ImportanceWeight(weight, ratio, weight != ratio)


def weight_counts(mask: Tensor, cu_seqlens: Tensor, level: Level, dtype: torch.dtype) -> Tensor:
    """How much each token counts in a batch's mean weight: [T]. On the token level a token is one weight, on the others a sequence is."""
    counted = mask.to(dtype)
    return counted if level == "token" else counted / sequence_sum(counted, cu_seqlens).clamp(min=1.0)
