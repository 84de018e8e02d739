"""pass@k and pass^k of groups of samples, without bias. Pure."""

from collections.abc import Sequence
from math import comb


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
