"""What a batch's samples say before they are trained: lengths, rewards, loops, passes. Pure; names are slime's (docs/metrics.md).

Per-sample numbers are the whole batch's. Per-token ones are sums that ranks add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

LOOP_TIMES = 8
"""So often is a phrase said in a row by a response that loops,"""

LOOP_TOKENS = 64
"""in at least so many tokens,"""

LOOP_LONGEST = 256
"""and it has at most so many tokens itself."""


def loops(response: ArrayLike) -> bool:
    """Whether a response, int [R], ends in a loop: its last tokens are one phrase, said over and over until generation stopped."""
    tail = np.asarray(response)[-LOOP_TIMES * LOOP_LONGEST :]
    if len(tail) < LOOP_TOKENS:
        return False
    backwards = tail[::-1]
    candidates = np.flatnonzero(backwards[1 : len(tail) // LOOP_TIMES + 1] == backwards[0]) + 1
    for period in candidates.tolist():
        span = max(LOOP_TIMES * period, LOOP_TOKENS)
        if np.array_equal(backwards[: span - period], backwards[period:span]):
            return True
    return False


def rollout(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    lengths: Sequence[int],
    *,
    truncated: ArrayLike,
    looping: ArrayLike | None = None,
    shaped: Sequence[float] | None = None,
) -> dict[str, float]:
    """Metrics of the samples of a batch, without the prefix ``rollout/``.

    Args:
        rewards: [N] as scored. groups: [N] the samples' groups. lengths: [N] tokens of the responses. truncated: bool [N].
        looping: bool [N], see `loops`; None: not known. shaped: [N] rewards as advantages start from them; None: not known.
    """
    if not len(rewards):
        return {}
    found = {
        "response_len/mean": float(np.mean(lengths)),
        "response_len/median": float(np.median(lengths)),
        "response_len/max": float(np.max(lengths)),
        "response_len/min": float(np.min(lengths)),
        "truncated_ratio": float(np.mean(np.asarray(truncated, dtype=np.float64))),
        "raw_reward": float(np.mean(rewards)),
    }
    if looping is not None:
        found["repetition_frac"] = float(np.mean(np.asarray(looping, dtype=np.float64)))
    if shaped is not None:
        found["rewards"] = float(np.mean(shaped))
    return found | zero_std(by_group(rewards, groups))


def by_group(rewards: Sequence[float], groups: Sequence[Hashable]) -> list[list[float]]:
    """Rewards group by group, in the order in which groups first come."""
    found: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        found.setdefault(group, []).append(reward)
    return list(found.values())


def zero_std(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """How many groups of several samples have equal rewards, by that reward to one decimal: all right or all wrong, they teach nothing."""
    equal = Counter(f"{round(rewards[0], 1) + 0.0:g}" for rewards in groups if len(rewards) > 1 and len(set(rewards)) == 1)
    return {f"zero_std/count_{reward}": float(count) for reward, count in sorted(equal.items())}


def passrate(groups: Sequence[Sequence[float]], threshold: float = 1.0) -> dict[str, float]:
    """``pass@k`` for k = 1, 2, 4, … as far as every group has k samples: the mean over groups of the probability that one of k samples
    drawn from the group passes.

    Of n samples c pass: 1 - C(n - c, k) / C(n, k), without bias (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Args:
        groups: rewards, group by group. threshold: a sample passes with a reward of at least this.
    """
    smallest = min((len(rewards) for rewards in groups), default=0)
    found, k = {}, 1
    while k <= smallest:
        passing = [(len(rewards), sum(reward >= threshold for reward in rewards)) for rewards in groups]
        found[f"pass@{k}"] = float(np.mean([1 - comb(n - c, k) / comb(n, k) for n, c in passing]))
        k *= 2
    return found


@dataclass(frozen=True)
class TokenSums:
    """Sums of per-token numbers over trained tokens, of one rank's samples or of all.

    Args:
        names: of the numbers, the same on every rank. sums: float64 [names + 1], the number of tokens last.
    """

    names: tuple[str, ...]
    sums: NDArray[np.float64]

    @classmethod
    def of(cls, masks: Mapping[int, NDArray[np.uint8]], numbers: Mapping[str, Mapping[int, NDArray[np.floating]]]) -> TokenSums:
        """Of a rank's samples.

        Args:
            masks: uint8 [R] by sample. numbers: by name and sample, [R]. Sorted by name, so that ranks agree.
        """
        names = tuple(sorted(numbers))
        sums = np.zeros(len(names) + 1)
        for sample, mask in masks.items():
            trained = mask != 0
            sums[-1] += np.count_nonzero(trained)
            for place, name in enumerate(names):
                sums[place] += float(np.sum(numbers[name][sample][trained], dtype=np.float64))
        return cls(names, sums)

    def means(self) -> dict[str, float]:
        """By name; nothing where no token is trained."""
        return {name: float(value / self.sums[-1]) for name, value in zip(self.names, self.sums, strict=False)} if self.sums[-1] else {}
