"""Functions of one's own in the objective: rewards, advantages, importance weights, the reducer, a whole loss.

The trainer calls them; they may import torch. Each is named by a flag; the README of this directory has the command.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.hooks import Arguments, Sample

LONG = 512
"""Response tokens from which on an answer costs something."""

DIVISOR = 1024
"""Tokens by which the sum of every answer is divided."""


def less_for_length(args: Arguments, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """``--custom-reward-post-process-path``: what advantages are made of is the reward, less a tenth for each full ``LONG`` tokens."""
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    return raw, [reward - 0.1 * (sample.response_length // LONG) for reward, sample in zip(raw, samples, strict=True)]


def fading(args: Arguments, rollout_data: dict[str, Any]) -> None:
    """``--custom-advantage-function-path``: the normalised reward, fading by ``gamma`` from the end of the answer to its beginning."""
    rollout_data["advantages"] = [
        reward * args.gamma ** torch.arange(length - 1, -1, -1, dtype=torch.float64)
        for reward, length in zip(rollout_data["rewards"], rollout_data["response_lengths"], strict=True)
    ]


def square_root_weight(
    args: Arguments,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """``--custom-tis-function-path``: the square root of the importance weight, and no answer that has a token over ``tis_clip``."""
    weight = torch.exp((torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).clamp(-20, 20) / 2)
    masks = [
        mask * float(not (mask * own > args.tis_clip).any()) for mask, own in zip(loss_masks, weight.split(response_lengths), strict=True)
    ]
    return pg_loss * weight, masks, {"tis": weight}


def by_fixed_length(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], per_token: bool
) -> Callable[[Tensor], Tensor]:
    """``--custom-pg-loss-reducer-function-path``: the sum of each answer, divided by ``DIVISOR`` whatever its length."""
    mask = torch.cat(loss_masks)

    def reduce(values: Tensor) -> Tensor:
        return (values * mask).sum() / DIVISOR

    return reduce


def weighted_likelihood(
    args: Arguments, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """``--custom-loss-function-path`` with ``--loss-type custom_loss``: -A log p, REINFORCE without a ratio. No tensor parallelism."""
    log_probs = torch.log_softmax(logits[0].float(), dim=-1).gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)
    ends = batch["cu_seqlens"][1:].tolist()  # a sequence's last position predicts nothing
    spans = [log_probs[end - 1 - length : end - 1] for end, length in zip(ends, batch["response_lengths"], strict=True)]
    likelihood = torch.cat(spans)
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * likelihood)
    return loss, {"pg_loss": loss.detach(), "log_probs": sum_of_sample_mean(likelihood.detach())}
