"""How the log-probs of engine and trainer differ over a step's tokens: estimates of the KL, and the differences' distribution.

Metrics of a loss are sums over micro-batches and ranks, so the distribution is counted in bins, and by where tokens stand; `summarised`
makes of the counts what is reported.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from services.trainer.objective.reduce import MaskedTokens
from shared.runtime.telemetry import declare_metrics

PREFIX = "mismatch_count_"
EDGES = tuple(10.0 ** (step / 4) for step in range(-28, 5))  # nats; of the bins, the last of which is open
PLACES = (256, 1024, 4096)  # tokens; of the ranges of places and lengths, the last of which is open
FEWEST = 100  # tokens of an expert that is named, counted in each layer

declare_metrics("""
    train/mismatch_k1 | nats | mean of log q − log p, of the engine's probability q and the trainer's p: an unbiased estimate of KL(q, p)
    train/mismatch_k2 | nats | mean of its half square: biased, of little variance
    train/mismatch_k3 | nats | mean of p/q − 1 − log p/q: an estimate of the same KL without bias, never negative
    train/mismatch_p99 | nats | the difference of log-probs that 99 % of the tokens do not exceed, rounded up by less than 78 %
    train/mismatch_max | nats | the largest one, rounded up likewise; 10 where it is larger
    train/mismatch_beyond | share | tokens whose difference is beyond `logprob_alarm`, or a bin's edge above it
    train/mismatch_at_<n> | nats | mean difference of tokens up to place n of a sequence, behind the next smaller n (256, 1024, 4096, inf)
    train/mismatch_of_<n> | nats | the same of sequences of such a length
    train/mismatch_expert | | with replayed routing: the expert whose tokens differ most, by its number in a layer, over all layers
    train/mismatch_expert_mean | nats | mean difference of its tokens; near the mean of all where no expert stands out
""")


def counts(start: Tensor, rollout: Tensor, tokens: MaskedTokens) -> dict[str, Tensor]:
    """Returns the metrics of a micro-batch. ``start``, ``rollout``: log-probs of trainer and engine [T], 0 where the mask is 0."""
    ratio, trained = (start - rollout).detach(), tokens.mask.to(tokens.dtype)
    found = {
        "mismatch_k1": tokens.mean(-ratio),
        "mismatch_k2": tokens.mean(ratio.square() / 2),
        "mismatch_k3": tokens.mean(ratio.clamp(max=20.0).expm1() - ratio),
    }
    difference, starts = ratio.abs(), tokens.batch.cu_seqlens.long()
    found |= _counted("bin", difference, EDGES, trained)
    lengths = starts.diff()
    every = torch.arange(len(ratio), device=ratio.device)
    place = every - torch.repeat_interleave(starts[:-1], lengths, output_size=len(ratio))
    length = torch.repeat_interleave(lengths, lengths, output_size=len(ratio))
    for name, at in (("at", place), ("of", length)):
        found |= _counted(f"{name}_tokens", at, PLACES, trained) | _counted(f"{name}_sum", at, PLACES, trained * difference)
    if tokens.batch.experts is not None:
        chosen, count = tokens.batch.experts.to(ratio.device).flatten(1).long(), tokens.batch.num_experts
        for name, each in (("tokens", trained), ("sum", trained * difference)):
            known = torch.where(chosen < 0, 0, each[:, None])
            found |= _summed(f"expert_{name}", chosen.clamp(min=0).flatten(), count, known.flatten())
    return found


def _counted(name: str, values: Tensor, edges: tuple[float, ...], weights: Tensor) -> dict[str, Tensor]:
    return _summed(name, torch.bucketize(values, torch.tensor(edges, device=values.device)), len(edges) + 1, weights)


def _summed(name: str, bins: Tensor, count: int, weights: Tensor) -> dict[str, Tensor]:
    sums = weights.new_zeros(count).index_add(0, bins, weights)
    return {f"{PREFIX}{name}_{index}": one for index, one in enumerate(sums)}


def summarised(metrics: Mapping[str, float], bound: float) -> dict[str, float]:
    """Returns a step's metrics with what the counts say in their place. ``bound``: of a difference, in nats."""
    rest = {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}
    bins = [metrics.get(f"{PREFIX}bin_{index}", 0.0) for index in range(len(EDGES) + 1)]
    if not (total := sum(bins)) or not math.isfinite(total):
        return rest
    tops = [*EDGES, EDGES[-1]]
    share = [sum(bins[: index + 1]) / total for index in range(len(bins))]
    rest["mismatch_p99"] = next(top for top, below in zip(tops, share, strict=True) if below >= 0.99 - 1e-9)
    rest["mismatch_max"] = max(top for top, one in zip(tops, bins, strict=True) if one)
    rest["mismatch_beyond"] = 1 - next(below for top, below in zip(tops, [*share[:-1], 1.0], strict=True) if top >= min(bound, EDGES[-1]))
    return rest | _means(metrics)


def _means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the mean difference of each range of places and of lengths that has tokens, and of the expert with the largest."""
    found = {}
    for name in ("at", "of"):
        for index, edge in enumerate((*PLACES, math.inf)):
            if tokens := metrics[f"{PREFIX}{name}_tokens_{index}"]:
                found[f"mismatch_{name}_{edge}"] = metrics[f"{PREFIX}{name}_sum_{index}"] / tokens
    of_expert = f"{PREFIX}expert_tokens_"
    means = {
        int(name.removeprefix(of_expert)): metrics[name.replace("tokens", "sum")] / tokens
        for name, tokens in metrics.items()
        if name.startswith(of_expert) and tokens >= FEWEST
    }
    if means:
        worst = max(means, key=means.__getitem__)
        found |= {"mismatch_expert": float(worst), "mismatch_expert_mean": means[worst]}
    return found
