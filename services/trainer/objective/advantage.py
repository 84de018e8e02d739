"""Rewards to advantages: always by group id, one vote per rollout, never by the shape of a batch.

A group that lost samples (dropped, dead, rejected) is normalised over those it has; two groups never mix.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from services.trainer.objective.config import ObjectiveConfig
from shared.errors import MyxoError

FloatArray = npt.NDArray[np.float64]

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


class BadReward(MyxoError):
    """Rewards that no group can be normalised with: one that is not finite, or a rollout with two of them.

    Args:
        rollout: its id. group: its group's id. problem: what is wrong, with the numbers.
    """

    def __init__(self, rollout: Hashable, group: Hashable, problem: str) -> None:
        self.rollout, self.group, self.problem = rollout, group, problem
        super().__init__(f"reward of rollout {rollout} (group {group}) {problem}")


def group_relative(
    rewards: Sequence[float] | npt.NDArray[np.floating],
    groups: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None = None,
    *,
    normalize_std: bool = True,
) -> FloatArray:
    """``(r - mean) / (std + 1e-6)`` within each group, the std unbiased: float64 [N].

    Without ``normalize_std`` only ``r - mean``. Exactly 0 for a group of one rollout, and for a group whose rewards are
    all equal: their mean may differ from them in the last bit, and a division by 1e-6 would make that a gradient.

    Args:
        rewards: [N], one per sample. groups: group id of each.
        rollout_ids: rollout of each; the samples that fan out of one rollout share group and reward, cast one vote and
            get the same advantage. If not given, every sample is a rollout.

    Source: GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; without the std, Dr.GRPO, Liu et al. 2025
    (arXiv:2503.20783), and the baseline of REINFORCE++, Hu et al. 2025 (arXiv:2501.03262).

    Raises:
        BadReward: a reward that is not finite, or two samples of one rollout with unlike groups or rewards.
        ValueError: rewards, groups and rollout ids of unlike length.
    """
    values = np.asarray(rewards, dtype=np.float64)
    rollouts: Sequence[Hashable] = range(values.size) if rollout_ids is None else rollout_ids
    if values.ndim != 1 or len(groups) != values.size or len(rollouts) != values.size:
        raise ValueError(f"rewards {values.shape}, {len(groups)} groups, {len(rollouts)} rollout ids: expected as many of each")

    voters: dict[Hashable, int] = {}  # rollout -> its first sample, which votes
    members: dict[Hashable, list[int]] = {}  # group -> voters
    for index, (rollout, group) in enumerate(zip(rollouts, groups, strict=True)):
        if not np.isfinite(values[index]):
            raise BadReward(rollout, group, f"is {values[index]}, expected a finite number")
        voter = voters.setdefault(rollout, index)
        if voter == index:
            members.setdefault(group, []).append(index)
        elif groups[voter] != group or values[voter] != values[index]:
            before = f"{values[voter]} in group {groups[voter]}"
            raise BadReward(rollout, group, f"is {values[index]}, but another sample of this rollout has {before}")

    advantages = np.zeros(values.size)
    for indexes in members.values():
        votes = values[indexes]
        if len(indexes) < 2 or np.ptp(votes) == 0.0:
            continue
        centred = votes - votes.mean()
        advantages[indexes] = centred / (votes.std(ddof=1) + STD_EPSILON) if normalize_std else centred
    return advantages[[voters[rollout] for rollout in rollouts]]


def reward_advantages(
    config: ObjectiveConfig,
    rewards: Sequence[float] | npt.NDArray[np.floating],
    groups: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None = None,
) -> FloatArray:
    """The advantage of each sample under the configured estimator, before whitening: float64 [N].

    grpo, gspo, cispo: ``group_relative``; reinforce_plus_plus_baseline: the same without the std; without
    ``normalize_rewards``: the reward as it is.
    """
    if not config.normalize_rewards:
        group_relative(rewards, groups, rollout_ids)  # for what it refuses
        return np.asarray(rewards, dtype=np.float64).copy()
    by_std = config.normalize_std and config.advantage_estimator != "reinforce_plus_plus_baseline"
    return group_relative(rewards, groups, rollout_ids, normalize_std=by_std)


def whiten(values: npt.NDArray[np.floating], mask: npt.NDArray[np.generic], *, shift_mean: bool = True) -> FloatArray:
    """``(x - mean) / sqrt(var + 1e-8)`` over the trained tokens, var Bessel-corrected: float64 [T], 0 elsewhere.

    Args:
        values, mask: [T], the whole batch's (all ranks'), so that the result does not depend on how it is split.
        shift_mean: False keeps the mean.

    One token has variance 0. Source: REINFORCE++ (arXiv:2501.03262); slime's masked whitening.
    """
    trained = np.asarray(mask) != 0
    if np.shape(values) != trained.shape:
        raise ValueError(f"values {np.shape(values)} and mask {trained.shape}: expected one shape")
    kept = np.asarray(values, dtype=np.float64)[trained]
    whitened = np.zeros(trained.shape)
    if kept.size:
        mean = kept.mean()
        variance = kept.var(ddof=1) if kept.size > 1 else 0.0
        whitened[trained] = (kept - mean) / np.sqrt(variance + WHITEN_EPSILON) + (0.0 if shift_mean else mean)
    return whitened


def whiten_samples(advantages: Sequence[float | npt.NDArray[np.floating]], masks: Sequence[npt.NDArray[np.generic]]) -> list[FloatArray]:
    """``whiten`` over the trained tokens of all samples: float64 [R] for each sample.

    Args:
        advantages: of each sample, one float or [R]. masks: [R] of each.
    """
    if len(advantages) != len(masks):
        raise ValueError(f"{len(advantages)} advantages for {len(masks)} masks")
    if not masks:
        return []
    spread = [np.broadcast_to(advantage, np.shape(mask)) for advantage, mask in zip(advantages, masks, strict=True)]
    whitened = whiten(np.concatenate(spread), np.concatenate([np.asarray(mask) for mask in masks]))
    return np.split(whitened, np.cumsum([len(mask) for mask in masks])[:-1])
