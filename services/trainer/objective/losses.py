"""Which loss a run has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from services.trainer.objective.custom_objective import CustomFunctions, CustomLoss
from services.trainer.objective.loss import PolicyLoss
from services.trainer.objective.sft_loss import SftLoss
from services.trainer.objective.statistics import Statistics
from shared.config.algorithm import AlgorithmSection

ActorLoss = PolicyLoss | SftLoss | CustomLoss


def loss_of(
    config: AlgorithmSection,
    custom: CustomFunctions | None = None,
    *,
    version: int | None = None,
    statistics: Statistics | None = None,
    denominator: float | None = None,
) -> ActorLoss:
    """The actor's loss for one optimizer step.

    Args:
        custom: the user's own functions. version: of the weights at batch start. statistics: where `needs` asks for them.
        denominator: ``reduce.denominator``, for a reducer of the user's own.
    """
    custom = custom or CustomFunctions()
    if config.loss_type == "custom_loss":
        return CustomLoss(custom)
    if config.loss_type == "sft_loss":
        return SftLoss()
    return PolicyLoss(config, version, statistics or Statistics(), replace(custom, denominator=denominator))


def passing(config: AlgorithmSection, rewards: Sequence[float] | npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    """Which samples of a batch are trained at all: bool [N].

    All of them, but for ``sft_loss``: those with a reward above ``rejection_threshold``. The others are to be left out before weights are
    made, so that the loss is the mean over those that pass.

    Source: rejection sampling fine-tuning, Yuan et al. 2023 (arXiv:2308.01825); RAFT, Dong et al. 2023 (arXiv:2304.06767).
    """
    values = np.asarray(rewards, dtype=np.float64)
    return values > config.rejection_threshold if config.loss_type == "sft_loss" else np.ones(values.shape, dtype=bool)
