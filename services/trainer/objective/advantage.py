"""Rewards to advantages: always by group id, one vote per rollout, never by the shape of a batch.

A group that lost samples (dropped, dead, rejected) is normalised over those it has; two groups never mix.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.trainer.objective.returns import discounted_sum, generalized_advantages
from shared.config.algorithm import AlgorithmSection
from shared.runtime.errors import MyxoError

FloatArray = npt.NDArray[np.float64]
Rewards = Sequence[float] | npt.NDArray[np.floating]
PerToken = Sequence[npt.NDArray[np.floating]]

STD_EPSILON = 1e-6


class BadReward(MyxoError):
    """A reward that no group can be normalised with: it is not finite, or its rollout belongs to two groups.

    Args:
        rollout: its id. group: its group's id. problem: what is wrong, with the numbers.
    """

    def __init__(self, rollout: Hashable, group: Hashable, problem: str) -> None:
        self.rollout, self.group, self.problem = rollout, group, problem
        super().__init__(f"reward of rollout {rollout} (group {group}) {problem}")


class BadTokens(MyxoError):
    """Per-token numbers that do not fit their sample.

    Args:
        field: what they are. sample: its place in the batch, rollout and group. problem: what is wrong, with the numbers.
    """

    def __init__(self, field: str, sample: str, problem: str) -> None:
        self.field, self.sample, self.problem = field, sample, problem
        super().__init__(f"{field} of sample {sample}: {problem}")


@dataclass(frozen=True)
class Needs:
    """What an objective asks for beside rewards, masks and the rollout's log-probs.

    Args:
        proximal: the trainer's log-probs at batch start. reference: those of the reference policy. kl, values, teacher_gap: the arguments
            of `token_advantages`. statistics: `batch_statistics` before each optimizer step.
    """

    proximal: bool
    reference: bool
    kl: bool
    values: bool
    teacher_gap: bool
    statistics: bool


@dataclass(frozen=True)
class Advantages:
    """Of each sample, 0 where the mask is 0: float64 [R]. returns: what a critic learns, None without one."""

    advantages: list[FloatArray]
    returns: list[FloatArray] | None = None


def needs(config: AlgorithmSection, optimizer_steps: int = 1) -> Needs:
    """What the configured objective needs. Args: optimizer_steps: that one batch is split into."""
    if config.loss_type == "sft_loss":
        return Needs(False, False, False, False, False, False)
    in_reward = config.kl_coef != 0.0
    statistics = config.loss_type == "policy_loss" and (config.tis_batch_normalize or config.use_m2po)
    of_old = (in_reward or config.use_opd) and config.correction != "rollout"
    return Needs(
        proximal=optimizer_steps > 1 or of_old or statistics,
        reference=in_reward or config.measures_kl,
        kl=in_reward,
        values=config.has_critic,
        teacher_gap=config.use_opd,
        statistics=statistics,
    )


def group_relative(
    rewards: Rewards,
    groups: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None = None,
    *,
    normalize_std: bool = True,
) -> FloatArray:
    """``(r - mean) / (std + 1e-6)`` within each group, the std unbiased: float64 [N].

    Without ``normalize_std`` only ``r - mean``. Exactly 0 for a group of one rollout, and for a group whose votes are
    all equal: their mean may differ from them in the last bit, and a division by 1e-6 would make that a gradient.

    Args:
        rewards: [N], one per sample. groups: group id of each.
        rollout_ids: rollout of each, unique over the batch; the samples that fan out of one rollout share the group and cast one vote,
            the mean of their rewards. If not given, every sample is a rollout.

    Source: GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; without the std, Dr.GRPO, Liu et al. 2025
    (arXiv:2503.20783), and the baseline of REINFORCE++, Hu et al. 2025 (arXiv:2501.03262).

    Raises:
        BadReward: a reward that is not finite, or two samples of one rollout in unlike groups.
        ValueError: rewards, groups and rollout ids of unlike length.
    """
    values = np.asarray(rewards, dtype=np.float64)
    rollouts: Sequence[Hashable] = range(values.size) if rollout_ids is None else rollout_ids
    if values.ndim != 1 or len(groups) != values.size or len(rollouts) != values.size:
        raise ValueError(f"rewards {values.shape}, {len(groups)} groups, {len(rollouts)} rollout ids: expected as many of each")

    samples: dict[Hashable, list[int]] = {}  # of each rollout
    members: dict[Hashable, list[Hashable]] = {}  # rollouts of each group
    for index, (rollout, group) in enumerate(zip(rollouts, groups, strict=True)):
        if not np.isfinite(values[index]):
            raise BadReward(rollout, group, f"is {values[index]}, expected a finite number")
        if rollout not in samples:
            samples[rollout] = []
            members.setdefault(group, []).append(rollout)
        elif groups[samples[rollout][0]] != group:
            other = groups[samples[rollout][0]]
            raise BadReward(rollout, group, f"is {values[index]}, but another sample of this rollout is in group {other}")
        samples[rollout].append(index)

    advantages = np.zeros(values.size)
    for of_group in members.values():
        votes = np.array([_vote(values[samples[rollout]]) for rollout in of_group])
        if len(votes) < 2 or np.ptp(votes) == 0.0:
            continue
        scale = votes.std(ddof=1) + STD_EPSILON if normalize_std else 1.0
        indexes = [index for rollout in of_group for index in samples[rollout]]
        advantages[indexes] = (values[indexes] - votes.mean()) / scale
    return advantages


def _vote(rewards: FloatArray) -> float:
    """The mean; equal rewards give themselves, to the bit."""
    return float(rewards[0]) if np.ptp(rewards) == 0.0 else float(rewards.mean())


def reward_advantages(
    config: AlgorithmSection, rewards: Rewards, groups: Sequence[Hashable], rollout_ids: Sequence[Hashable] | None = None
) -> FloatArray:
    """What each sample's reward is to its estimator, before token-level terms and whitening: float64 [N].

    grpo, gspo, cispo: ``group_relative``; reinforce_plus_plus_baseline: the same without the std; ppo, reinforce_plus_plus, and all of
    them without ``normalize_rewards``: the reward as it is.
    """
    by_std = not config.disable_grpo_std_normalization and config.advantage_estimator != "reinforce_plus_plus_baseline"
    relative = group_relative(rewards, groups, rollout_ids, normalize_std=by_std)  # also for what it refuses
    if not config.normalizes_rewards or config.advantage_estimator in ("ppo", "reinforce_plus_plus"):
        return np.asarray(rewards, dtype=np.float64).copy()
    return relative


def token_advantages(
    config: AlgorithmSection,
    rewards: Rewards,
    groups: Sequence[Hashable],
    rollouts: Sequence[Hashable] | None,
    masks: Sequence[npt.NDArray[np.generic]],
    *,
    kl: PerToken | None = None,
    values: PerToken | None = None,
    teacher_gap: PerToken | None = None,
    own: Sequence[int] | None = None,
    custom: Callable[[FloatArray], Advantages] | None = None,
) -> Advantages:
    """The advantage of each token under the configured estimator, before whitening.

    With r the reward after ``reward_advantages``, on the trained tokens:

    * grpo, gspo, cispo: ``A_t = r``; reinforce_plus_plus_baseline: ``A_t = r - kl_coef KL_t``;
    * reinforce_plus_plus: ``r_t = -kl_coef KL_t``, r more on the last, ``A_t = r_t + gamma A_{t+1}``;
    * ppo: GAE of the same ``r_t`` (``returns.py``).

    With ``use_opd`` less ``opd_kl_coef`` times the teacher's gap.

    Args:
        rewards, groups, rollouts: [N], of the whole batch (see `group_relative`).
        masks: [R] of each sample; what stands at mask 0 of the following is ignored. kl: estimates of log pi_old - log pi_ref (``kl.py``).
        values: the critic's. teacher_gap: log pi_old - log pi_teacher.
        own: places in the batch of the samples that masks, kl, values and teacher_gap are of, for a rank that holds a part; default: all.
        custom: in place of the estimator, from ``reward_advantages`` of the own samples (``CustomFunctions.advantages``).

    Sources: REINFORCE++, Hu et al. 2025 (arXiv:2501.03262); PPO with a KL in the reward, Ouyang et al. 2022 (arXiv:2203.02155); on-policy
    distillation, Agarwal et al. 2024 (arXiv:2306.13649), as a reward of each token, Thinking Machines Lab 2025.

    Raises:
        BadReward; BadTokens: one of the lists is missing, of another length than the mask, or not finite on a trained token; ValueError.
    """
    of_sample = reward_advantages(config, rewards, groups, rollouts)
    places = range(len(of_sample)) if own is None else own
    if len(masks) != len(places):
        raise ValueError(f"{len(masks)} masks for {len(places)} samples")
    wanted = needs(config)
    all_lists = {
        "kl": (kl, wanted.kl, f"kl_coef {config.kl_coef}"),
        "values": (values, wanted.values, config.advantage_estimator),
        "teacher_gap": (teacher_gap, wanted.teacher_gap, "use_opd"),
    }
    wanted_lists: dict[str, PerToken] = {}
    for field, (lists, wants, what_for) in all_lists.items():
        if not wants:
            continue
        if lists is None or len(lists) != len(places):
            raise BadTokens(field, "(any)", f"{what_for} needs {len(places)} arrays, got {'none' if lists is None else len(lists)}")
        wanted_lists[field] = lists

    by_custom = custom(of_sample[list(places)]) if custom is not None else None
    advantages, returns = [], []
    for number, place in enumerate(places):
        trained = np.asarray(masks[number]) != 0
        name = f"{place} (rollout {place if rollouts is None else rollouts[place]}, group {groups[place]})"
        kept = {field: _trained(field, lists[number], trained, name) for field, lists in wanted_lists.items()}
        if by_custom is None:
            advantage, learned = _of_one(config, of_sample[place], int(trained.sum()), kept)
        else:
            advantage = learned = by_custom.advantages[number][trained]
        if "teacher_gap" in kept:
            advantage = advantage - config.opd_kl_coef * kept["teacher_gap"]
        advantages.append(_spread(advantage, trained))
        returns.append(_spread(learned, trained))
    if by_custom is not None:
        return Advantages(advantages, by_custom.returns)
    return Advantages(advantages, returns if config.has_critic else None)


def _of_one(config: AlgorithmSection, reward: float, tokens: int, kept: dict[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """(advantages, returns) of one sample's trained tokens."""
    penalty = config.kl_coef * kept["kl"] if "kl" in kept else np.zeros(tokens)
    if config.advantage_estimator not in ("ppo", "reinforce_plus_plus"):
        advantage = np.full(tokens, reward) - penalty
        return advantage, advantage
    token_rewards = -penalty
    token_rewards[-1:] += reward
    if config.has_critic:
        return generalized_advantages(token_rewards, kept["values"], config.gamma, config.lambd)
    advantage = discounted_sum(token_rewards, config.gamma)
    return advantage, advantage


def _trained(field: str, values: npt.NDArray[np.floating], trained: npt.NDArray[np.bool_], name: str) -> FloatArray:
    """Of the trained tokens: float64 [K]."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != trained.shape:
        raise BadTokens(field, name, f"shape {array.shape} for {trained.size} response tokens")
    bad = np.flatnonzero(trained & ~np.isfinite(array))
    if bad.size:
        problem = f"is {array[bad[0]]} at trained position {bad[0]} ({bad.size} such positions), expected finite numbers"
        raise BadTokens(field, name, problem)
    return array[trained]


def _spread(values: FloatArray, trained: npt.NDArray[np.bool_]) -> FloatArray:
    result = np.zeros(trained.shape)
    result[trained] = values
    return result
