"""The trainer's objective: rewards to advantages, log-probs to a loss. Pure functions; no Megatron, no bus.

A batch passes through ``passing`` (per sample), ``token_advantages`` (per sample), ``Moments`` and ``whitened`` (per sample, by the whole
batch), ``sample_weights`` (per sample), packing, ``batch_statistics`` (per optimizer step), then for each micro-batch the loss of
``loss_of``, or a critic's ``ValueLoss``. ``needs`` returns the inputs that it requires; ``CustomFunctions`` are the user's own.
"""

from services.trainer.objective.advantage import (
    Advantages,
    BadReward,
    Needs,
    distilled,
    group_relative,
    needs,
    reward_advantages,
    token_advantages,
)
from services.trainer.objective.correction import MissingStatistics, Statistics, batch_statistics
from services.trainer.objective.custom_objective import CustomFunctions, CustomLoss
from services.trainer.objective.loss import PolicyLoss, SftLoss, ValueLoss, loss_of, passing
from services.trainer.objective.reduce import denominator, sample_weights
from services.trainer.objective.tokens import MissingField
from services.trainer.objective.whitening import Moments, whitened

__all__ = [
    "Advantages",
    "BadReward",
    "CustomFunctions",
    "CustomLoss",
    "MissingField",
    "MissingStatistics",
    "Moments",
    "Needs",
    "PolicyLoss",
    "SftLoss",
    "Statistics",
    "ValueLoss",
    "batch_statistics",
    "denominator",
    "distilled",
    "group_relative",
    "loss_of",
    "needs",
    "passing",
    "reward_advantages",
    "sample_weights",
    "token_advantages",
    "whitened",
]
