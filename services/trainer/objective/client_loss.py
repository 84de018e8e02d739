"""The losses that clients of the training endpoint name: sums over tokens, without any mean.

Symbols: log p of a target token under the model, log q as the client gives it (``logprobs``), the ratio r = p / q, the advantage A, the
weight w. All are [T].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from services.trainer.objective.policy_gradient import clipped_surrogate, clipped_weight, ratio_of
from services.trainer.packing import PackedBatch


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
        return token_losses(self.loss, self.config, log_probs, batch.fields).sum(), {}
