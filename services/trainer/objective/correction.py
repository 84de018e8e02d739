"""Weights and masks of the policy gradient's tokens by the distance between behaviour, proximal and trained policy.

Some of it needs statistics of a whole optimizer step: of every rank's tokens, once, before the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.objective.importance import (
    importance_weight,
    level_ratio,
    off_policy_sequence_mask,
    second_moment_limit,
    second_moments,
    vetoed,
    weight_counts,
    within,
)
from services.trainer.objective.tokens import MaskedTokens, Metrics, MissingField
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
    """Returns the statistics of one optimizer step. A collective if ``gather`` is one; then every data-parallel rank calls it.

    Args:
        batches: this rank's micro-batches, with fields ``weights``, ``advantages``, ``rollout_log_probs``, ``proximal_log_probs``.

    Raises:
        MissingField: a micro-batch lacks one of these fields.
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
        mean_weight = total / count if total > 0.0 else 1.0  # where every weight is 0, there is nothing to scale
    if wants_moments:
        limit = second_moment_limit(gather(torch.cat(moments)), config.m2_threshold)
    return Statistics(mean_weight, limit)


class MissingStatistics(ValueError):
    """A loss was called without the statistics of the whole batch that its config needs."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} needs batch_statistics of the optimizer step, but the loss was given none")


def weighted(
    config: AlgorithmSection, pg: Tensor, start: Tensor, rollout: Tensor, tokens: MaskedTokens, statistics: Statistics
) -> tuple[Tensor, Metrics]:
    """Returns the per-token loss times its importance weight, 0 for rejected tokens and sequences: [T]; and the metrics of both.

    Args:
        start: log-probs of the proximal policy [T]. rollout: of the behaviour policy [T].
    """
    cu_seqlens = tokens.batch.cu_seqlens
    weights = importance_weight(
        start, rollout, tokens.mask, cu_seqlens,
        mode=config.tis_mode, level=config.tis_level, low=config.tis_clip_low, high=config.tis_clip,
    )  # fmt: skip
    metrics = {"tis": tokens.mean(weights.ratio), "tis_clipfrac": tokens.mean(weights.changed.to(tokens.dtype))}
    pg = pg * weights.weight
    if config.tis_batch_normalize:
        if statistics.mean_weight is None:
            raise MissingStatistics("tis_batch_normalize")
        pg = pg / statistics.mean_weight
    if config.use_rs:
        ratio = level_ratio(start - rollout, tokens.mask, cu_seqlens, config.rs_level or config.tis_level)
        stays = within(ratio, *config.rejection_bounds)
        pg = pg * stays.to(pg.dtype)
        metrics["rs_clipfrac"] = tokens.mean((~stays).to(tokens.dtype))
    if config.rs_veto_threshold is not None:
        gone = vetoed(start - rollout, tokens.mask, cu_seqlens, config.rs_veto_threshold)
        pg = pg * (~gone).to(pg.dtype)
        metrics["rs_veto_frac"] = tokens.mean(gone.to(tokens.dtype))
    return pg, metrics


def opsm(config: AlgorithmSection, pg: Tensor, rollout: Tensor, advantages: Tensor, tokens: MaskedTokens) -> tuple[Tensor, Metrics]:
    """Returns the per-token loss without the sequences that `off_policy_sequence_mask` drops, [T], and the fraction dropped."""
    cu_seqlens = tokens.batch.cu_seqlens
    stays = off_policy_sequence_mask(tokens.log_probs, rollout, advantages, tokens.mask, cu_seqlens, config.opsm_delta)
    return pg * stays.to(pg.dtype), {"opsm_clipfrac": tokens.mean((~stays).to(tokens.dtype))}
