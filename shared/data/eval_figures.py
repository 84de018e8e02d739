"""The figures of a set of held-out prompts that was evaluated. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shared.data import pass_rates

QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
"""Those of the lengths of responses."""


def eval_figures(groups: Sequence[Sequence[float]], lengths: ArrayLike, truncated: int, passes: float) -> dict[str, Any]:
    """Returns the fields of `shared.schema.messages.EvalResult` that are figures.

    Args:
        groups: the rewards of each prompt's samples. lengths: of their responses, in tokens; [] where they are not known.
        truncated: the samples that ended at their length. passes: a sample passes with a reward of at least this.
    """
    rewards = [reward for group in groups for reward in group]
    counts = pass_rates.pass_counts(groups, passes)
    rates = {f"pass@{k}": pass_rates.pass_at(counts, k) for k in pass_rates.powers(counts)}
    rates |= {f"pass^{k}": pass_rates.pass_all(counts, k) for k in pass_rates.powers(counts)}
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
