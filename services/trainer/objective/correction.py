"""The policy gradient's tokens, weighted and masked by how far the policies are apart that drew, begun with and learn them."""

from __future__ import annotations

from torch import Tensor

from services.trainer.objective.importance import (
    importance_weight,
    level_ratio,
    off_policy_sequence_mask,
    vetoed,
    within,
)
from services.trainer.objective.statistics import Statistics
from services.trainer.objective.tokens import MaskedTokens, Metrics
from shared.config.algorithm import AlgorithmSection


class MissingStatistics(ValueError):
    """A loss was called without the numbers of the whole batch that its config asks for."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} needs batch_statistics of the optimizer step, but the loss was given none")


def weighted(
    config: AlgorithmSection, pg: Tensor, start: Tensor, rollout: Tensor, tokens: MaskedTokens, statistics: Statistics
) -> tuple[Tensor, Metrics]:
    """The per-token loss times its importance weight, rejected tokens and sequences at 0: [T]; with the metrics of both.

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
    """The per-token loss without the sequences that `off_policy_sequence_mask` drops: [T]; and their share."""
    cu_seqlens = tokens.batch.cu_seqlens
    stays = off_policy_sequence_mask(tokens.log_probs, rollout, advantages, tokens.mask, cu_seqlens, config.opsm_delta)
    return pg * stays.to(pg.dtype), {"opsm_clipfrac": tokens.mean((~stays).to(tokens.dtype))}
