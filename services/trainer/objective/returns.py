"""Rewards along one response to returns and advantages. All tensors are float64 over the trained tokens only, [K], in order.

What an environment or a tool wrote between them takes no time: it is no action of the policy's, and no value is learned there.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
