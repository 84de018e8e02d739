"""M2PO's trust region: instead of a clip per token, a bound on the mean square of the batch's log ratios.

Only tokens count that a clip could bound: with ``x = log pi_theta - log pi_behaviour``, those with A > 0 and x > 0, or A < 0 and x < 0. Of
them the ones with the largest x^2 are masked until the mean of the others is at most the bound.

Source: M2PO, Zheng et al. 2025, "Prosperity before collapse" (arXiv:2510.01161), algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def second_moments(log_probs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """``x^2`` where a clip could bound the token, 0 elsewhere: [T], detached. mask: bool [T]."""
    x = (log_probs - behaviour).detach()
    leaving = mask & (x * torch.sign(advantages) > 0)
    return torch.where(leaving, x.square(), torch.zeros_like(x))


def second_moment_limit(moments: Tensor, bound: float) -> float:
    """The limit above which moments are masked: the largest that leaves a mean of at most ``bound``.

    Args:
        moments: of the whole batch, any shape; zeros do not count.

    It lies half-way between the largest that stays and the smallest that goes, so that rounding moves no token over it. Equal ones stay or
    go together. inf where all stay, 0 where none does.
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
    """True [T] where the loss stays."""
    return moments <= limit
