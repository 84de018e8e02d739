"""pass@k and pass^k of groups of samples, without bias, and the other figures of an evaluated set of prompts. Pure."""

from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def pass_counts(groups: Sequence[Sequence[float]], threshold: float) -> list[tuple[int, int]]:
    """Returns of each group of rewards (samples, those that pass: with a reward of at least ``threshold``)."""
    return [(len(rewards), sum(reward >= threshold for reward in rewards)) for rewards in groups]


def powers(groups: Sequence[tuple[int, int]]) -> list[int]:
    """Returns k = 1, 2, 4, … as far as every group has k samples."""
    smallest = min((samples for samples, _ in groups), default=0)
    return [1 << exponent for exponent in range(smallest.bit_length())]


def pass_at(groups: Sequence[tuple[int, int]], k: int) -> float:
    """Returns pass@k: the mean over groups of the probability that one of k samples drawn from the group passes.

    Of n samples c pass: 1 - C(n - c, k) / C(n, k), without bias (Chen et al. 2021, arXiv:2107.03374, eq. 1).
    """
    return sum(1 - comb(n - c, k) / comb(n, k) for n, c in groups) / len(groups)


def pass_all(groups: Sequence[tuple[int, int]], k: int) -> float:
    """Returns pass^k: the mean over groups of the probability that all of k samples drawn from the group pass.

    Of n samples c pass: C(c, k) / C(n, k), without bias (Yao et al. 2024, arXiv:2406.12045, section 3).
    """
    return sum(comb(c, k) / comb(n, k) for n, c in groups) / len(groups)


QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}  # Those of the lengths of responses


def of_rollouts(values: Sequence[float], rollouts: Sequence[int]) -> list[float]:
    """Returns the mean of each rollout's values: one of several conversations counts once. ``rollouts``: of each value; []: all differ."""
    if not rollouts:
        return list(values)
    found: dict[int, list[float]] = {}
    for value, rollout in zip(values, rollouts, strict=True):
        found.setdefault(rollout, []).append(value)
    return [sum(each) / len(each) for each in found.values()]


def eval_figures(groups: Sequence[Sequence[float]], lengths: ArrayLike, truncated: int, passes: float) -> dict[str, Any]:
    """Returns the fields of `shared.schema.messages.EvalResult` that are figures.

    Args:
        groups: the rewards of each prompt's rollouts. lengths: of their responses, in tokens; [] where they are not known.
        truncated: the rollouts that ended at their length. passes: a rollout passes with a reward of at least this.
    """
    rewards = [reward for group in groups for reward in group]
    counts = pass_counts(groups, passes)
    rates = {f"pass@{k}": pass_at(counts, k) for k in powers(counts)}
    rates |= {f"pass^{k}": pass_all(counts, k) for k in powers(counts)}
    return {
        "samples": len(rewards),
        "mean_reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "rates": rates,
        "lengths": _spread(np.asarray(lengths)),
        "truncated": truncated / len(rewards) if rewards else 0.0,
    }


def _spread(tokens: Any) -> dict[str, float]:
    if not len(tokens):
        return {}
    quantiles = np.quantile(tokens, list(QUANTILES.values()))
    return {"mean": float(tokens.mean()), **dict(zip(QUANTILES, map(float, quantiles), strict=True))}
