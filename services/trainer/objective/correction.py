"""Off-policy correction for samples of another policy: weights, rejections and masks, never part of the gradient.

Behaviour policy: the engine's, log-probs as it gave them with the tokens. Proximal policy: the trainer's at batch
start. The decoupled objective clips around the proximal policy and weights by proximal over behaviour: Hilton et al.
2022 (arXiv:2110.00641, "Batch size-invariance for policy optimization", section 3), AReaL (arXiv:2505.24298).
All tensors are [T], finite everywhere. Some of it needs statistics of a whole optimizer step: of every rank's tokens, once, before it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.trainer.objective.policy_gradient import ratio_of
from services.trainer.objective.reduce import MaskedTokens, Metrics, sequence_mean, sequence_sum
from services.trainer.packing import PackedBatch
from shared.config.algorithm import AlgorithmSection, Level
from shared.runtime.telemetry import declare_metrics

declare_metrics("""
    train/tis | ratio | mean importance weight of the trainer's policy over the engine's, before it is clamped | where the objective
        corrects by it
    train/tis_clipfrac | share | tokens whose weight is clamped or masked | where the objective corrects by it
    train/rs_clipfrac | share | tokens that rejection sampling takes out | with `use_rs`
    train/rs_veto_frac | share | tokens of sequences that one token far out takes out | with `rs_veto_threshold`
""")

# The one-dimensional float64 tensors (on the CPU, of any length) of all data-parallel ranks, end to end
Gather = Callable[[Tensor], Tensor]


class ImportanceWeight(NamedTuple):
    """weight: floats [T], detached. ratio: the same before its bounds. changed: bool [T], true where they took effect."""

    weight: Tensor
    ratio: Tensor
    changed: Tensor


@dataclass(frozen=True)
class Statistics:
    """mean_weight: of the bounded importance weights that are not 0. second_moment_limit: as the function has it. None: not asked."""

    mean_weight: float | None = None
    second_moment_limit: float | None = None


def level_ratio(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, level: Level) -> Tensor:
    """Returns each token's ratio (``token``), or for every token of a sequence that of all its trained tokens (``sequence``), or its
    geometric mean over them (``geometric``): [T], detached. Log ratios are clamped to +-20 before ``exp``.

    Source: MIS, Liu et al. 2025, "When speed kills stability"; the geometric mean, GSPO (arXiv:2507.18071).
    """
    log_ratio = log_ratio.detach()
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio * mask.to(log_ratio.dtype), cu_seqlens)
    elif level == "geometric":
        log_ratio = sequence_mean(log_ratio, mask, cu_seqlens)
    return ratio_of(log_ratio)


def importance_weight(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, config: AlgorithmSection) -> ImportanceWeight:
    """Returns the ratio of the config's level, bounded: ``truncate`` bounds it by ``tis_clip``, ``clip`` by ``tis_clip_low`` too, ``mask``
    makes it 0 outside of both.

    Args:
        log_ratio: log-probs of the proximal policy less the behaviour policy's [T]. mask: bool [T]. cu_seqlens: int32 [S + 1].

    Source: TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; mask, IcePop, Ling
    team 2025 (arXiv:2510.18855).
    """
    ratio, low, high = level_ratio(log_ratio, mask, cu_seqlens, config.tis_level), config.tis_clip_low, config.tis_clip
    if config.tis_mode == "mask":
        weight = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    else:
        weight = ratio.clamp(min=low if config.tis_mode == "clip" else None, max=high)
    return ImportanceWeight(weight, ratio, weight != ratio)


def off_policy_sequence_mask(d: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor, delta: float) -> Tensor:
    """Returns a mask [T], false where A < 0 and the sequence's mean of ``d`` is above delta.

    Args:
        d: log-probs of the old policy, the one that the ratio is to, less those of the policy being trained [T]. delta: nats per token.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, off-policy sequence masking. There the old policy is the engine's, as with
    ``off_policy`` rollout.
    """
    distance = sequence_mean(d.detach(), mask, cu_seqlens)
    return ~((advantages < 0) & (distance > delta))


def second_moments(log_probs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns ``x^2`` where a clip could bound the token, 0 elsewhere: [T], detached. mask: bool [T].

    With ``x = log pi_theta - log pi_behaviour`` a clip could bound tokens with A > 0 and x > 0, or A < 0 and x < 0. M2PO bounds their mean:
    those with the largest x^2 are masked until the mean of the others is at most the bound.

    Source: M2PO, Zheng et al. 2025, "Prosperity before collapse" (arXiv:2510.01161), algorithm 1.
    """
    x = (log_probs - behaviour).detach()
    return torch.where(mask & (x * torch.sign(advantages) > 0), x.square(), 0.0)


def second_moment_limit(moments: Tensor, bound: float) -> float:
    """Returns the limit above which moments are masked: the largest that leaves a mean of at most ``bound``.

    Args:
        moments: of the whole batch, any shape; zeros do not count.

    It lies half-way between the largest kept moment and the smallest masked, so that rounding moves no token over it. Equal ones stay or
    go together. Returns inf where all stay, 0 where none does.
    """
    ordered = moments.double().flatten()
    ordered = ordered[ordered > 0].sort().values
    if not ordered.numel():
        return math.inf
    means = ordered.cumsum(0) / torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    last_of_equals = torch.ones_like(ordered, dtype=torch.bool)
    last_of_equals[:-1] = ordered[:-1] < ordered[1:]
    stays = torch.nonzero(last_of_equals & (means <= bound)).flatten()
    if not stays.numel():
        return 0.0
    place = int(stays[-1])
    return math.inf if place == ordered.numel() - 1 else float(ordered[place] + ordered[place + 1]) / 2


def batch_statistics(config: AlgorithmSection, batches: Sequence[PackedBatch], gather: Gather = lambda values: values) -> Statistics:
    """Returns the statistics of one optimizer step that the config asks for. A collective if ``gather`` is one.

    Args:
        batches: this rank's micro-batches, with fields ``weights``, ``advantages``, ``rollout_log_probs``, ``proximal_log_probs``.
    """
    sums, moments = torch.zeros(2, dtype=torch.float64), [torch.zeros(0, dtype=torch.float64)]
    for batch in batches:
        tokens = MaskedTokens(batch.fields["proximal_log_probs"], batch)
        start, rollout = tokens.log_probs, tokens.field("rollout_log_probs")
        if config.tis_batch_normalize:
            weights = importance_weight(start - rollout, tokens.mask, batch.cu_seqlens, config).weight.double()
            counts = tokens.mask.double()
            if config.tis_level != "token":  # a sequence is one weight
                counts = counts / sequence_sum(counts, batch.cu_seqlens).clamp(min=1.0)
            counts = counts * (weights > 0)  # what is masked out has no weight
            sums += torch.stack([(counts * weights).sum(), counts.sum()]).cpu()
        if config.use_m2po:
            of_batch = second_moments(start, rollout, tokens.field("advantages"), tokens.mask)
            moments.append(of_batch[of_batch > 0].double().cpu())
    mean_weight, limit = None, None
    if config.tis_batch_normalize:
        total, count = gather(sums).view(-1, 2).sum(0).tolist()
        mean_weight = total / count if total > 0.0 else 1.0  # where every weight is 0, there is nothing to scale
    if config.use_m2po:
        limit = second_moment_limit(gather(torch.cat(moments)), config.m2_threshold)
    return Statistics(mean_weight, limit)


def weighted(
    config: AlgorithmSection, pg: Tensor, log_ratio: Tensor, tokens: MaskedTokens, statistics: Statistics
) -> tuple[Tensor, Metrics]:
    """Returns the per-token loss times its importance weight, 0 for rejected tokens and sequences: [T]; and the metrics of both.

    A veto rejects a sequence of which a trained token has a ratio below the threshold: the trainer's policy would hardly have sampled it.

    Args:
        log_ratio: log-probs of the proximal policy less the behaviour policy's [T].

    Source: rejection sampling and vetoes of MIS, Liu et al. 2025, "When speed kills stability".
    """
    cu_seqlens = tokens.batch.cu_seqlens
    weights = importance_weight(log_ratio, tokens.mask, cu_seqlens, config)
    metrics = {"tis": tokens.mean(weights.ratio), "tis_clipfrac": tokens.fraction(weights.changed)}
    pg = pg * weights.weight
    if config.tis_batch_normalize:
        assert statistics.mean_weight is not None
        pg = pg / statistics.mean_weight
    if config.use_rs:
        ratio, (low, high) = level_ratio(log_ratio, tokens.mask, cu_seqlens, config.rs_level or config.tis_level), config.rejection_bounds
        stays = (ratio >= low) & (ratio <= high)
        pg = pg * stays
        metrics["rs_clipfrac"] = tokens.fraction(~stays)
    if config.rs_veto_threshold is not None:
        below = tokens.mask & (ratio_of(log_ratio.detach()) < config.rs_veto_threshold)
        gone = sequence_sum(below.to(tokens.dtype), cu_seqlens) > 0
        pg = pg * ~gone
        metrics["rs_veto_frac"] = tokens.fraction(gone)
    return pg, metrics
