"""Estimates of KL(pi_theta || pi_ref) per token, from the log-probs of sampled tokens."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from services.trainer.objective.policy_gradient import LOG_RATIO_LIMIT
from shared.config.algorithm import KlType

LOW_VARIANCE_LIMIT = 10.0

LOSS_KL: Final = "k3"
"""Unless configured: k1 has no gradient in the mean of the policy's own samples (slime's default is k1)."""

REWARD_KL: Final = "k1"
"""Unless configured: the unbiased one, and a reward has no gradient anyway."""


def kl_estimate(log_probs: Tensor, reference: Tensor, kind: KlType, ratio: Tensor | None = None) -> Tensor:
    """With x = log pi_theta - log pi_ref: k1 = x, k2 = x^2 / 2, k3 = e^-x - 1 + x; low_var_kl = k3 clamped to +-10.

    Args:
        log_probs, reference: floats [T], finite. kind: which estimate.
        ratio: ``pi_theta / pi_old`` [T] with its gradient, if the estimate is to be unbiased off-policy; multiplies
            before low_var_kl's clamp.

    For k3, x is first clamped to at least -20: beyond, ``exp`` overflows float32, and neither value nor gradient means
    anything. ``expm1`` because near x = 0, where policies are close, ``exp(-x) - 1`` keeps no digit in float32.

    Source: k1, k2, k3, Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); k3 as a loss,
    GRPO (arXiv:2402.03300), eq. 4; unbiased, DeepSeek-V3.2 (arXiv:2512.02556), section 3.1.
    """
    x = log_probs - reference
    if kind == "k1":
        estimate = x
    elif kind == "k2":
        estimate = x.square() / 2
    else:
        x = x.clamp(min=-LOG_RATIO_LIMIT)
        estimate = torch.expm1(-x) + x
    if ratio is not None:
        estimate = ratio * estimate
    if kind == "low_var_kl":
        estimate = estimate.clamp(-LOW_VARIANCE_LIMIT, LOW_VARIANCE_LIMIT)
    return estimate
