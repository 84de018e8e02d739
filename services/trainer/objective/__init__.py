"""What the trainer optimises: rewards to advantages, log-probs to a loss. Pure functions; no Megatron, no bus.

On the way of a batch: ``reward_advantages`` (per sample), ``sample_weights`` (per sample), packing, then for
each micro-batch a ``Loss``: ``PolicyLoss`` or ``SftLoss``.
"""

from services.trainer.objective.advantage import BadReward, group_relative, reward_advantages, whiten, whiten_samples
from services.trainer.objective.config import ObjectiveConfig
from services.trainer.objective.loss import Loss, MissingField, PolicyLoss
from services.trainer.objective.reduce import sample_weights
from services.trainer.objective.sft import SftLoss

__all__ = [
    "BadReward",
    "Loss",
    "MissingField",
    "ObjectiveConfig",
    "PolicyLoss",
    "SftLoss",
    "group_relative",
    "reward_advantages",
    "sample_weights",
    "whiten",
    "whiten_samples",
]
