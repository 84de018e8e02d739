"""The reduction of tokens' losses to one number: one weight per sample, from the whole batch before it is packed.

With ``weights[t] = w_sample * mask[t]`` the loss of a micro-batch is ``sum(weights * x)``, and the batch's loss is the
plain sum over micro-batches and data-parallel ranks, whatever the split. The denominators are those of the mask as it
came: sequence masks and zero importance weights do not change them.

Source: per rollout, GRPO (arXiv:2402.03300), eq. 3; per token, DAPO (arXiv:2503.14476), eq. 8; by a fixed length,
Dr.GRPO, Liu et al. 2025 (arXiv:2503.20783).
"""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from shared.config.algorithm import Reducer

FloatArray = npt.NDArray[np.float64]


def sample_weights(
    trained_tokens: Sequence[int],
    rollout_ids: Sequence[Hashable],
    reducer: Reducer = "rollout_mean",
    fixed_length: int | None = None,
) -> FloatArray:
    """Returns the weight of each trained token of each sample: float64 [N].

    Args:
        trained_tokens: sum of the mask of each of the N samples of one optimizer step, all ranks together.
        rollout_ids: the rollout of each sample; the samples that fan out of one rollout share its id.
        reducer: ``rollout_mean``: ``1 / (G max(tokens of the rollout, 1))`` for G rollouts; ``token_mean``:
            ``1 / sum over samples of max(tokens, 1)``; ``fixed_length``: ``1 / (G fixed_length)``.

    Raises:
        ValueError: no samples, unlike lengths, a negative count, or ``fixed_length`` missing where it is used.
    """
    tokens = np.asarray(trained_tokens, dtype=np.int64)
    if tokens.size == 0 or len(rollout_ids) != tokens.size:
        raise ValueError(f"{tokens.size} token counts for {len(rollout_ids)} rollout ids, expected as many, at least one")
    if tokens.min() < 0:
        raise ValueError(f"sample {int(tokens.argmin())} has {int(tokens.min())} trained tokens")
    if reducer == "token_mean":
        return np.full(tokens.size, 1.0 / float(np.maximum(tokens, 1).sum()))
    totals: dict[Hashable, int] = {}
    for rollout, count in zip(rollout_ids, tokens.tolist(), strict=True):
        totals[rollout] = totals.get(rollout, 0) + count
    if reducer == "fixed_length":
        if fixed_length is None or fixed_length <= 0:
            raise ValueError(f"reducer fixed_length needs fixed_length > 0, got {fixed_length}")
        return np.full(tokens.size, 1.0 / (len(totals) * fixed_length))
    return np.array([1.0 / (len(totals) * max(totals[rollout], 1)) for rollout in rollout_ids])


def denominator(trained_tokens: Sequence[int], rollout_ids: Sequence[Hashable], reducer: Reducer = "rollout_mean") -> float:
    """Returns the divisor of a sum over one optimizer step's samples: its rollouts, or with ``token_mean`` ``sum of max(tokens, 1)``."""
    if reducer == "token_mean":
        return float(np.maximum(np.asarray(trained_tokens, dtype=np.int64), 1).sum())
    return float(len(set(rollout_ids)))
