"""Rewards along one response to returns and advantages. All arrays are float64 over the trained tokens only, [K], in order.

What an environment or a tool wrote between them takes no time: it is no action of the policy's, and no value is learned there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_BLOCK = 64


def discounted_sum(values: FloatArray, factor: float) -> FloatArray:
    """``y_t = x_t + factor y_{t+1}``, 0 beyond the end.

    Block by block, since a response may have 100,000 tokens: within a block by a matrix of powers, which cannot overflow for a factor of
    at most 1, between blocks by what is carried over.
    """
    if not values.size:
        return np.zeros(0)
    blocks = -(-values.size // _BLOCK)
    padded = np.zeros(blocks * _BLOCK)
    padded[: values.size] = values
    distance = np.arange(_BLOCK)[:, None] - np.arange(_BLOCK)[None, :]
    powers = np.where(distance >= 0, float(factor) ** np.abs(distance), 0.0)  # [later, earlier]
    sums = padded.reshape(blocks, _BLOCK) @ powers
    to_the_next = float(factor) ** np.arange(_BLOCK, 0, -1)
    for block in range(blocks - 2, -1, -1):
        sums[block] += to_the_next * sums[block + 1, 0]
    result: FloatArray = sums.reshape(-1)[: values.size]
    return result


def generalized_advantages(rewards: FloatArray, values: FloatArray, gamma: float, lambd: float) -> tuple[FloatArray, FloatArray]:
    """GAE: ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lambd A_{t+1}``, returns ``A_t + V_t``.

    Args:
        rewards, values: [K]; ``values[t]`` is that of the state in which token t is chosen. Beyond the last token there is none: 0.

    Source: Schulman et al. 2015 (arXiv:1506.02438), eq. 16; for language models, Ouyang et al. 2022 (arXiv:2203.02155).
    """
    behind = np.append(values[1:], 0.0)[: values.size]
    advantages = discounted_sum(rewards + gamma * behind - values, gamma * lambd)
    return advantages, advantages + values
