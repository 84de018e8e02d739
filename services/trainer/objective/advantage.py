"""The advantage of each token: of its sample's reward beside its group's (`shared.rewards.reward_advantage`), KL, values and teachers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.config.algorithm import AlgorithmSection
from shared.rewards.reward_advantage import FloatArray, Rewards

WHITEN_EPSILON = 1e-8
_BLOCK = 64


def discounted_sum(values: Tensor, factor: float) -> Tensor:
    """Returns ``y_t = x_t + factor y_{t+1}``, 0 beyond the end.

    Block by block, since a response may have 100,000 tokens: within a block by a matrix of powers, which cannot overflow for a factor of
    at most 1, between blocks by what is carried over.
    """
    if not values.numel():
        return values
    blocks = -(-values.numel() // _BLOCK)
    padded = torch.zeros(blocks * _BLOCK, dtype=torch.float64)
    padded[: values.numel()] = values
    positions = torch.arange(_BLOCK, dtype=torch.float64)
    distance = positions[:, None] - positions[None, :]
    powers = torch.where(distance >= 0, float(factor) ** distance.abs(), 0.0)  # [later, earlier]
    sums = padded.reshape(blocks, _BLOCK) @ powers
    to_the_next = float(factor) ** torch.arange(_BLOCK, 0, -1, dtype=torch.float64)
    for block in range(blocks - 2, -1, -1):
        sums[block] += to_the_next * sums[block + 1, 0]
    return sums.reshape(-1)[: values.numel()]


def generalized_advantages(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Returns GAE: ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lambd A_{t+1}``; and returns ``A_t + V_t``.

    Args:
        rewards, values: [K]; ``values[t]`` is that of the state in which token t is chosen. Beyond the last token there is none: 0.

    Source: Schulman et al. 2015 (arXiv:1506.02438), eq. 16; for language models, Ouyang et al. 2022 (arXiv:2203.02155).
    """
    next_values = torch.cat([values[1:], values.new_zeros(1)])[: values.numel()]
    advantages = discounted_sum(rewards + gamma * next_values - values, gamma * lambd)
    return advantages, advantages + values


@dataclass(frozen=True)
class Needs:
    """The inputs that an objective needs beside rewards, masks and the rollout's log-probs.

    Args:
        proximal: the trainer's log-probs at batch start. reference: those of the reference policy. kl, values: the arguments of
            `token_advantages`. teacher_gap: that of `distilled`. statistics: `batch_statistics` before each optimizer step.
    """

    proximal: bool = False
    reference: bool = False
    kl: bool = False
    values: bool = False
    teacher_gap: bool = False
    statistics: bool = False


@dataclass(frozen=True)
class Advantages:
    """The advantages of each sample's tokens, 0 where the mask is 0: float64 [R]. returns: what a critic learns, None without one."""

    advantages: list[Tensor]
    returns: list[Tensor] | None = None


def needs(config: AlgorithmSection, optimizer_steps: int = 1) -> Needs:
    """Returns the inputs that the configured objective needs. ``optimizer_steps``: the number of steps that a batch is split into."""
    if config.loss_type == "sft_loss":
        return Needs()
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


def less_kl(
    config: AlgorithmSection,
    rewards: Rewards,
    own: Sequence[int],
    kl: Sequence[Tensor],
    masks: Sequence[Tensor],
    total: Callable[[FloatArray], FloatArray],
) -> FloatArray:
    """Returns every sample's reward less ``kl_coef`` times the KL of its trained tokens together: float64 [N]. For rloo, which compares
    these.

    Args:
        own: the samples of this rank. kl, masks: [R] of each of them. total: the sum of an array over the ranks, a collective.

    Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), section 2.1: the whole response is one action, with one reward.
    """
    penalties = np.zeros(len(rewards))
    penalties[list(own)] = [float(values[mask].double().sum()) for values, mask in zip(kl, masks, strict=True)]
    return np.asarray(rewards, dtype=np.float64) - config.kl_coef * total(penalties)


def token_advantages(
    config: AlgorithmSection,
    rewards: Rewards,
    masks: Sequence[Tensor],
    *,
    kl: Sequence[Tensor] | None = None,
    values: Sequence[Tensor] | None = None,
) -> Advantages:
    """Returns the advantage of each token under the configured estimator, before whitening.

    With r the reward after ``reward_advantages``, on the trained tokens:

    * grpo, gspo, cispo, rloo: ``A_t = r``; reinforce_plus_plus_baseline: ``A_t = r - kl_coef KL_t``;
    * reinforce_plus_plus: ``r_t = -kl_coef KL_t``, r more on the last, ``A_t = r_t + gamma A_{t+1}``;
    * ppo: GAE of the same ``r_t`` (``generalized_advantages``).

    Args:
        rewards: of each sample, as ``reward_advantages`` gives them. masks: bool [R] of each; what stands elsewhere is ignored.
        kl: estimates of log pi_old - log pi_ref (``kl_estimate``), [R] of each, with ``kl_coef``. values: the critic's, likewise, for ppo.

    Sources: REINFORCE++, Hu et al. 2025 (arXiv:2501.03262); PPO with a KL in the reward, Ouyang et al. 2022 (arXiv:2203.02155).
    """
    advantages, returns = [], []
    for index, (reward, mask) in enumerate(zip(rewards, masks, strict=True)):
        penalty = torch.zeros(int(mask.sum()), dtype=torch.float64)
        if kl is not None and config.advantage_estimator != "rloo":  # there it is in r
            penalty = config.kl_coef * kl[index][mask].double()
        if config.advantage_estimator not in ("ppo", "reinforce_plus_plus"):
            advantages.append(_spread(float(reward) - penalty, mask))
            continue
        token_rewards = -penalty
        token_rewards[-1:] += float(reward)
        if values is None:
            advantages.append(_spread(discounted_sum(token_rewards, config.gamma), mask))
        else:
            found = generalized_advantages(token_rewards, values[index][mask].double(), config.gamma, config.lambd)
            advantages.append(_spread(found[0], mask))
            returns.append(_spread(found[1], mask))
    return Advantages(advantages, returns if config.has_critic else None)


def distilled(
    config: AlgorithmSection, advantages: Sequence[Tensor], old: Sequence[Tensor], teacher: Sequence[Tensor], masks: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the advantages less ``opd_kl_coef (log pi_old - log pi_teacher)`` on the trained tokens: float64 [R] each.

    Args:
        old, teacher: log-probs, [R] of each sample.

    Sources: on-policy distillation, Agarwal et al. 2024 (arXiv:2306.13649), as a reward of each token, Thinking Machines Lab 2025.
    """
    return [
        advantage - config.opd_kl_coef * torch.where(mask, (of_old - of_teacher).double(), 0.0)
        for advantage, of_old, of_teacher, mask in zip(advantages, old, teacher, masks, strict=True)
    ]


def whitened(values: Sequence[Tensor], masks: Sequence[Tensor], total: Callable[[FloatArray], FloatArray]) -> list[Tensor]:
    """Returns ``(x - mean) / sqrt(variance + 1e-8)`` where the mask is true, else 0: float64 [R] each.

    Mean and Bessel-corrected variance are those of the trained tokens of all ranks.

    Args:
        values: float64 [R] of each sample of this rank. masks: bool [R] of each. total: the sum of an array over the ranks, a collective.

    Source: REINFORCE++, Hu et al. 2025 (arXiv:2501.03262); slime's masked whitening.
    """
    trained = torch.cat([torch.empty(0, dtype=torch.float64), *(value[mask] for value, mask in zip(values, masks, strict=True))])
    count, of_all = total(np.array([trained.numel(), float(trained.sum())])).tolist()
    mean = of_all / max(count, 1.0)
    (squares,) = total(np.array([float((trained - mean).square().sum())])).tolist()
    scale = math.sqrt(squares / max(count - 1.0, 1.0) + WHITEN_EPSILON)
    return [torch.where(mask, (value - mean) / scale, 0.0) for value, mask in zip(values, masks, strict=True)]


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    result = torch.zeros(mask.shape, dtype=torch.float64)
    result[mask] = values
    return result
