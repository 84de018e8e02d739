"""A sample's reward relative to the others of its group: the part of an advantage that needs no token. Pure.

Always by group id, one vote per rollout, never by the shape of a batch. A group that lost samples (dropped, dead, rejected) is normalised
over those it has; two groups never mix.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.config.algorithm import AlgorithmSection

FloatArray = npt.NDArray[np.float64]
Rewards = Sequence[float] | FloatArray

STD_EPSILON = 1e-6


def group_relative(
    rewards: Rewards, groups: Sequence[Hashable], rollout_ids: Sequence[Hashable] | None = None, *, normalize_std: bool = True
) -> FloatArray:
    """Returns ``(r - mean) / (std + 1e-6)`` within each group: float64 [N]; without ``normalize_std`` only ``r - mean``.

    A rollout has one vote, split evenly over its samples. Mean and deviation are of these weighted samples: with R rollouts, n_q samples
    in rollout q and the samples' rewards x, ``mean = sum(x / n_q) / R`` and ``std^2 = sum((x - mean)^2 / n_q) / (R - 1)``. With one sample
    a rollout that is the unbiased deviation of the rewards.

    Exactly 0 for a group of one rollout, and for a group whose rewards are all equal: their mean may differ from them in the last bit, and
    a division by 1e-6 would make that a gradient.

    Args:
        rewards: [N], one per sample, finite. groups: group id of each.
        rollout_ids: rollout of each, unique over the batch; the samples that fan out of one rollout share the group. If not given, every
            sample is a rollout.

    Source: GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; without the std, Dr.GRPO, Liu et al. 2025
    (arXiv:2503.20783), and the baseline of REINFORCE++, Hu et al. 2025 (arXiv:2501.03262).
    """
    values, advantages = np.asarray(rewards, dtype=np.float64), np.zeros(len(rewards))
    for group in _groups(values, groups, rollout_ids):
        rewards_of = values[group.samples]
        centred = rewards_of - group.weights @ rewards_of
        variance = group.weights @ np.square(centred) * group.rollouts / (group.rollouts - 1)
        advantages[group.samples] = centred / (math.sqrt(variance) + STD_EPSILON) if normalize_std else centred
    return advantages


def leave_one_out(rewards: Rewards, groups: Sequence[Hashable], rollout_ids: Sequence[Hashable] | None = None) -> FloatArray:
    """Returns ``r - mean of the other rollouts' votes`` within each group: float64 [N]. A rollout's vote is the mean of its samples'
    rewards. Arguments, and where this is exactly 0: as for ``group_relative``. Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), eq.
    9; Kool et al. 2019."""
    values, advantages = np.asarray(rewards, dtype=np.float64), np.zeros(len(rewards))
    for group in _groups(values, groups, rollout_ids):
        rewards_of, own = values[group.samples], group.weights * group.rollouts
        votes = np.bincount(group.rollout_of, own * rewards_of)
        others = (votes.sum() - votes) / (group.rollouts - 1)
        advantages[group.samples] = rewards_of - others[group.rollout_of]
    return advantages


class _Group(NamedTuple):
    """The samples of a group, indices [n]; the rollout of each, from 0; the weight of each in the group's mean; the number of rollouts."""

    samples: npt.NDArray[np.intp]
    rollout_of: npt.NDArray[np.intp]
    weights: FloatArray
    rollouts: int


def _groups(values: FloatArray, groups: Sequence[Hashable], rollout_ids: Sequence[Hashable] | None) -> Iterator[_Group]:
    """Yields the groups in which there is something to compare: more than one rollout, and rewards that differ."""
    members: dict[Hashable, dict[Hashable, list[int]]] = {}
    rollouts = range(values.size) if rollout_ids is None else rollout_ids
    for index, (_, group, rollout) in enumerate(zip(values, groups, rollouts, strict=True)):
        members.setdefault(group, {}).setdefault(rollout, []).append(index)
    for of_rollouts in members.values():
        sizes = [len(indices) for indices in of_rollouts.values()]
        samples = np.array([index for indices in of_rollouts.values() for index in indices])
        if len(sizes) > 1 and np.ptp(values[samples]) > 0.0:
            rollout_of = np.repeat(np.arange(len(sizes)), sizes)
            yield _Group(samples, rollout_of, 1.0 / (np.array(sizes)[rollout_of] * len(sizes)), len(sizes))


def turn_advantages(
    config: AlgorithmSection, returns: FloatArray, turns: Sequence[int], groups: Sequence[Hashable], rollout_ids: Sequence[Hashable]
) -> FloatArray:
    """Returns of each sample's turn k its return, compared as rewards are, within those of its group that have a turn k: float64 [N, K]. 0
    for the only rollout with a turn k: nothing is there to compare it with.

    Args:
        returns: float64 [N, K], ``R_k = sum over l >= k of turn_gamma^(l - k) r_l``. turns: [N], how many turns each sample has.

    Source: MT-GRPO, Zeng et al. 2025 (arXiv:2505.11821): a turn's reward less the group's mean for that turn, by its deviation, beside the
    outcome's advantage. Discounted returns of steps beside it: GiGPO, Feng et al. 2025 (arXiv:2505.10978), there by equal states.
    """
    found = np.zeros_like(returns)
    for turn in range(returns.shape[1]):
        there = [index for index, count in enumerate(turns) if count > turn]
        of = [groups[index] for index in there], [rollout_ids[index] for index in there]
        found[there, turn] = reward_advantages(config, returns[there, turn], *of)
    return found


def reward_advantages(
    config: AlgorithmSection, rewards: Rewards, groups: Sequence[Hashable], rollout_ids: Sequence[Hashable] | None = None
) -> FloatArray:
    """Returns each sample's reward as its estimator uses it, before token-level terms and whitening: float64 [N]. grpo, gspo, cispo:
    ``group_relative``; reinforce_plus_plus_baseline: the same without the std; rloo: ``leave_one_out``; ppo, reinforce_plus_plus, and all
    of them without ``normalize_rewards``: the reward as it is."""
    if not config.compares_rewards:
        return np.array(rewards, dtype=np.float64)
    if config.advantage_estimator == "rloo":
        return leave_one_out(rewards, groups, rollout_ids)
    by_std = not config.disable_grpo_std_normalization and config.advantage_estimator != "reinforce_plus_plus_baseline"
    return group_relative(rewards, groups, rollout_ids, normalize_std=by_std)
