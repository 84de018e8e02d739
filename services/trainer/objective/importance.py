"""Off-policy correction for samples of another policy: weights, rejections and masks, never part of the gradient.

Behaviour policy: the engine's, log-probs as it gave them with the tokens. Proximal policy: the trainer's at batch
start. The decoupled objective clips around the proximal policy and weights by proximal over behaviour: Hilton et al.
2022 (arXiv:2110.00641, "Batch size-invariance for policy optimization", section 3), AReaL (arXiv:2505.24298).
All tensors are [T], finite everywhere.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from services.trainer.objective.policy_gradient import ratio_of
from services.trainer.objective.tokens import sequence_mean, sequence_sum
from shared.config.algorithm import Level, WeightBounding


class ImportanceWeight(NamedTuple):
    """weight: floats [T], detached. ratio: the same before its bounds. changed: bool [T], true where they took effect."""

    weight: Tensor
    ratio: Tensor
    changed: Tensor


def level_ratio(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, level: Level) -> Tensor:
    """Returns each token's ratio (``token``), or for every token of a sequence that of all its trained tokens (``sequence``), or its
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
    """Returns ``w = exp(proximal - behaviour)``, bounded.

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
    """Returns each token's count in a batch's mean weight: [T]. On the token level a token is one weight, on the others a sequence."""
    counted = mask.to(dtype)
    return counted if level == "token" else counted / sequence_sum(counted, cu_seqlens).clamp(min=1.0)


def within(ratio: Tensor, low: float, high: float) -> Tensor:
    """Returns a mask [T], true where the loss stays: the ratio (of its level, ``level_ratio``) lies inside [low, high].

    Source: rejection sampling of MIS, Liu et al. 2025, "When speed kills stability".
    """
    return (ratio >= low) & (ratio <= high)


def vetoed(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, threshold: float) -> Tensor:
    """Returns a mask [T], true on a sequence of which a trained token has a ratio below the threshold: the trainer's policy would hardly
    ever have drawn it. Source: MIS, as above."""
    below = mask & (ratio_of(log_ratio.detach()) < threshold)
    return sequence_sum(below.to(log_ratio.dtype), cu_seqlens) > 0


def off_policy_sequence_mask(
    log_probs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor, delta: float
) -> Tensor:
    """Returns a mask [T], false where A < 0 and the sequence's mean of ``behaviour - log_probs`` is above delta.

    Args:
        log_probs: of the policy being trained [T]. behaviour: the rollout's [T]. delta: nats per token.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, off-policy sequence masking. As there, the distance is from
    the engine's own log-probs, so that it holds both staleness and the engine's mismatch (slime: from its old
    log-probs, which are the trainer's unless told otherwise).
    """
    distance = sequence_mean((behaviour - log_probs).detach(), mask, cu_seqlens)
    return ~((advantages < 0) & (distance > delta))


def second_moments(log_probs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns ``x^2`` where a clip could bound the token, 0 elsewhere: [T], detached. mask: bool [T].

    With ``x = log pi_theta - log pi_behaviour`` a clip could bound tokens with A > 0 and x > 0, or A < 0 and x < 0. M2PO bounds their mean:
    those with the largest x^2 are masked until the mean of the others is at most the bound.

    Source: M2PO, Zheng et al. 2025, "Prosperity before collapse" (arXiv:2510.01161), algorithm 1.
    """
    x = (log_probs - behaviour).detach()
    leaving = mask & (x * torch.sign(advantages) > 0)
    return torch.where(leaving, x.square(), torch.zeros_like(x))


def second_moment_limit(moments: Tensor, bound: float) -> float:
    """Returns the limit above which moments are masked: the largest that leaves a mean of at most ``bound``.

    Args:
        moments: of the whole batch, any shape; zeros do not count.

    It lies half-way between the largest kept moment and the smallest masked, so that rounding moves no token over it. Equal ones stay or
    go together. Returns inf where all stay, 0 where none does.
    """
    ordered = moments.double().flatten()
    ordered = ordered[ordered > 0].sort().values
    if not ordered.numel():
        return math.inf
    means = ordered.cumsum(0) / torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    last_of_equals = torch.ones_like(ordered, dtype=torch.bool)
    last_of_equals[:-1] = ordered[:-1] < ordered[1:]
    stays = torch.nonzero(last_of_equals & (means <= bound)).flatten()
    if not stays.numel():
        return 0.0
    place = int(stays[-1])
    return math.inf if place == ordered.numel() - 1 else float(ordered[place] + ordered[place + 1]) / 2


def second_moment_mask(moments: Tensor, limit: float) -> Tensor:
    """Returns a mask [T], true where the loss stays."""
    return moments <= limit
