"""The reduction of tokens' losses to one number: one weight per sample, from the whole batch before it is packed.

With ``weights[t] = w_sample * mask[t]`` the loss of a micro-batch is ``sum(weights * x)``, and the batch's loss is the
plain sum over micro-batches and data-parallel ranks, whatever the split. The denominators are those of the mask as it
came: sequence masks and zero importance weights do not change them.

Source: per rollout, GRPO (arXiv:2402.03300), eq. 3; per token, DAPO (arXiv:2503.14476), eq. 8; by a fixed length,
Dr.GRPO, Liu et al. 2025 (arXiv:2503.20783).
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from shared.config.algorithm import AlgorithmSection, Reducer

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
            ``1 / max(tokens of all samples, 1)``; ``fixed_length``: ``1 / (G fixed_length)``.
    """
    divisor = denominator(trained_tokens, rollout_ids, reducer)
    if reducer == "token_mean":
        return np.full(len(trained_tokens), 1.0 / divisor)
    if reducer == "fixed_length":
        assert fixed_length is not None
        return np.full(len(trained_tokens), 1.0 / (divisor * fixed_length))
    totals = Counter[Hashable]()
    for rollout, count in zip(rollout_ids, trained_tokens, strict=True):
        totals[rollout] += count
    return np.array([1.0 / (divisor * max(totals[rollout], 1)) for rollout in rollout_ids])


def denominator(trained_tokens: Sequence[int], rollout_ids: Sequence[Hashable], reducer: Reducer = "rollout_mean") -> float:
    """Returns the divisor of a sum over one optimizer step's samples: its rollouts, or with ``token_mean`` its trained tokens.

    A sample of which nothing is trained, such as one that a filter removed, counts no token; its rollout counts as a rollout, as in slime.
    """
    if reducer == "token_mean":  # slime counts one token for a sample without any, which makes the mean smaller than that of the tokens
        return float(max(sum(trained_tokens), 1))
    return float(max(len(set(rollout_ids)), 1))  # of a rejection that nothing passes there is none


def passing(config: AlgorithmSection, rewards: Sequence[float]) -> npt.NDArray[np.bool_]:
    """Returns a mask of the samples of a batch that are trained: bool [N].

    All of them, but for ``sft_loss``: those with a reward above ``rejection_threshold``. The others are to be left out before weights are
    made, so that the loss is the mean over those that pass.

    Source: rejection sampling fine-tuning, Yuan et al. 2023 (arXiv:2308.01825); RAFT, Dong et al. 2023 (arXiv:2304.06767).
    """
    values = np.asarray(rewards, dtype=np.float64)
    return values > config.rejection_threshold if config.loss_type == "sft_loss" else np.ones(values.shape, dtype=bool)
