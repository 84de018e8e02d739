"""Numbers of a whole optimizer step that single tokens are weighted or masked by. They need every rank's tokens, once, before the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.objective.importance import importance_weight, second_moment_limit, second_moments, weight_counts
from services.trainer.objective.tokens import MaskedTokens, MissingField
from services.trainer.packing import PackedBatch
from shared.config.algorithm import AlgorithmSection

Gather = Callable[[Tensor], Tensor]
"""The one-dimensional float64 tensors (on the CPU, of any length) of all data-parallel ranks, end to end."""


@dataclass(frozen=True)
class Statistics:
    """mean_weight: of the bounded importance weights. second_moment_limit: see `second_moment_limit`. None: not asked for."""

    mean_weight: float | None = None
    second_moment_limit: float | None = None


def batch_statistics(config: AlgorithmSection, batches: Sequence[PackedBatch], gather: Gather = lambda values: values) -> Statistics:
    """Of one optimizer step; a collective if ``gather`` is one, and then called by every data-parallel rank.

    Args:
        batches: this rank's micro-batches, with fields ``weights``, ``advantages``, ``rollout_log_probs``, ``proximal_log_probs``.

    Raises:
        MissingField.
    """
    wants_mean, wants_moments = config.tis_batch_normalize, config.use_m2po
    sums, moments = torch.zeros(2, dtype=torch.float64), [torch.zeros(0, dtype=torch.float64)]
    for batch in batches if wants_mean or wants_moments else ():
        if "proximal_log_probs" not in batch.fields:
            raise MissingField("proximal_log_probs", "statistics of the batch", batch.fields)
        tokens = MaskedTokens(batch.fields["proximal_log_probs"], batch)
        start, rollout = tokens.log_probs, tokens.field("rollout_log_probs", "statistics of the batch")
        if wants_mean:
            weights = importance_weight(
                start, rollout, tokens.mask, batch.cu_seqlens,
                mode=config.tis_mode, level=config.tis_level, low=config.tis_clip_low, high=config.tis_clip,
            ).weight.double()  # fmt: skip
            counts = weight_counts(tokens.mask, batch.cu_seqlens, config.tis_level, torch.float64)
            sums += torch.stack([(counts * weights).sum(), counts.sum()]).cpu()
        if wants_moments:
            of_batch = second_moments(start, rollout, tokens.field("advantages", "use_m2po"), tokens.mask)
            moments.append(of_batch[of_batch > 0].double().cpu())
    mean_weight, limit = None, None
    if wants_mean:
        total, count = gather(sums).view(-1, 2).sum(0).tolist()
        mean_weight = total / count if total > 0.0 else 1.0  # where every weight is 0, nothing is left to be scaled
    if wants_moments:
        limit = second_moment_limit(gather(torch.cat(moments)), config.m2_threshold)
    return Statistics(mean_weight, limit)
