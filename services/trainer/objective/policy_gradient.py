"""Policy-gradient losses and estimates of the KL per token, before weighting and averaging.

Symbols: d = log pi_old - log pi_theta, the ratio rho = exp(-d), A the advantage, c the dual clip. All tensors are [T],
finite everywhere (``loss.py`` blanks what the mask excludes).

Clients of the training endpoint name losses that are sums over tokens, without any mean: log q as the client gives it (``logprobs``), the
ratio r = p / q, the weight w.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from services.trainer.packing import PackedBatch
from shared.config.algorithm import LOG_RATIO_LIMIT, KlType


class PolicyGradient(NamedTuple):
    """loss: floats [T]. clipped: bool [T], where the clip changed the loss (PPO, GSPO) or the weight (CISPO)."""

    loss: Tensor
    clipped: Tensor


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Returns ``exp(log_ratio)`` with the log ratio clamped to +-20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(d: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyGradient:
    """Returns ``max(-rho A, -clip(rho, clip_low, clip_high) A)``; with a dual clip at most ``-c A`` where A < 0.

    Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), eq. 7; unlike bounds, DAPO, Yu et al. 2025 (arXiv:2503.14476);
    dual clip, Ye et al. 2020 (arXiv:1912.09729). Also GRPO's (arXiv:2402.03300).
    """
    ratio = ratio_of(-d)
    free = -ratio * advantages
    bounded = -ratio.clamp(clip_low, clip_high) * advantages
    loss = torch.maximum(free, bounded)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(-dual_clip * advantages, loss), loss)
    return PolicyGradient(loss, (bounded > free).detach())


def masked_surrogate(d: Tensor, advantages: Tensor, stays: Tensor) -> PolicyGradient:
    """Returns ``-rho A`` where ``stays`` [T] is true, else 0: M2PO's loss, whose mask replaces the clip (``second_moments``)."""
    return PolicyGradient(torch.where(stays, -ratio_of(-d) * advantages, 0.0), ~stays)


def clipped_weight(d: Tensor, log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyGradient:
    """Returns ``-stopgrad[clip(rho, clip_low, clip_high)] A log pi_theta``: no token loses its gradient.

    Source: CISPO, MiniMax-M1 2025 (arXiv:2506.13585), eq. 4 and 5.
    """
    ratio = ratio_of(-d).detach()
    weight = ratio.clamp(clip_low, clip_high)
    return PolicyGradient(-weight * advantages * log_probs, weight != ratio)


LOW_VARIANCE_LIMIT = 10.0
# The default estimate in the loss: k1 has no gradient in the mean of the policy's own samples (slime's default is k1)
LOSS_KL: Final = "k3"
REWARD_KL: Final = "k1"  # the default estimate in the reward: it is unbiased, and a reward has no gradient


def kl_estimate(log_probs: Tensor, reference: Tensor, kind: KlType, ratio: Tensor | None = None) -> Tensor:
    """Returns, with x = log pi_theta - log pi_ref: k1 = x, k2 = x^2 / 2, k3 = e^-x - 1 + x; low_var_kl = k3 clamped to +-10.

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


def token_losses(loss: str, config: Mapping[str, float], log_probs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """Returns the losses of a micro-batch's tokens: [T].

    ``cross_entropy`` -w log p; ``importance_sampling`` -r A; ``ppo`` -min(r A, clip(r, low, high) A); ``cispo`` -stopgrad[clip(r, low,
    high)] A log p; ``dro`` -(A log p - beta / 2 (log r)^2). log r is clamped to +-20 but in ``dro``.

    Sources: PPO (arXiv:1707.06347); CISPO, MiniMax-M1 (arXiv:2506.13585); DRO (arXiv:2405.19107).
    """
    if loss == "cross_entropy":
        return -fields["weights"] * log_probs
    advantages, d = fields["advantages"], fields["logprobs"] - log_probs
    if loss == "importance_sampling":
        return -ratio_of(-d) * advantages
    if loss == "dro":
        return -(advantages * log_probs - 0.5 * config["beta"] * d.square())
    bounds = config["clip_low_threshold"], config["clip_high_threshold"]
    if loss == "ppo":
        return clipped_surrogate(d, advantages, *bounds).loss
    return clipped_weight(d, log_probs, advantages, *bounds).loss


@dataclass
class ClientLoss:
    """A loss by its name; an instance is a `LossFunction`. ``found``: the log-probs of each micro-batch, in the order of the passes."""

    loss: str
    config: Mapping[str, float]
    found: list[Tensor] = field(default_factory=list)

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the sum of the micro-batch's losses. ``log_probs``: [T]."""
        self.found.append(log_probs.detach())
        return token_losses(self.loss, self.config, log_probs, batch.fields).where(batch.loss_mask > 0, 0.0).sum(), {}
