"""The beginnings that sequences of a micro-batch have in common, each to be computed once.

Under causal attention the hidden states of a token depend on the tokens up to it and on no others, so sequences that begin alike have the
same states there: samples of one prompt, forks of one session, conversations under one system prompt. A token is shared if the token after
it is shared, too; then what predicts it is the same as well, and log-probs of the computed tokens are those of all. So each sequence
computes at least its last token, and each fork the last token before it.

It is exact: what the copies would have computed twice is computed once and read by all of them, and the gradient that flows into it is the
sum of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """The tokens of a pack of S sequences that are computed, U of T.

    Args:
        shared: int64 [S], how many of each sequence's first tokens another one computes.
        computed: int64 [U], their positions in the pack, ascending.
        back: int64 [T], for each token of the pack its index in ``computed``.
    """

    shared: NDArray[np.int64]
    computed: NDArray[np.int64]
    back: NDArray[np.int64]

    @property
    def saved(self) -> float:
        """Returns the share of the pack's tokens that is not computed."""
        return 1 - len(self.computed) / max(len(self.back), 1)


def routed_keys(tokens: NDArray[np.int64], experts: NDArray[np.int16]) -> NDArray[np.int64]:
    """Returns numbers that are equal where both the token and its experts are, int64 [T]: `shared_prefixes` takes them for tokens.

    Args:
        experts: int16 [T, layers, experts a token].
    """
    flat = experts.reshape(len(tokens), -1)
    # random odd factors modulo 2^64: two rows that differ have the same sum with a probability of about 2^-63
    factors = np.random.default_rng(0).integers(1, 2**62, flat.shape[1] + 1, np.int64) * 2 + 1
    keys = tokens * factors[0]
    for column, factor in enumerate(factors[1:].tolist()):
        keys += flat[:, column] * np.int64(factor)
    return keys


def shared_prefixes(tokens: NDArray[np.int64], starts: Sequence[int]) -> SharedPrefixes:
    """Finds all that can be shared.

    Args:
        tokens: [T]. starts: of the sequences, and T.
    """
    spans = list(pairwise(starts))
    encoded, width = tokens.tobytes(), tokens.itemsize
    order = sorted(range(len(spans)), key=lambda index: encoded[width * spans[index][0] : width * spans[index][1]])
    shared = np.zeros(len(spans), np.int64)
    # of all sequences before it in this order, none has more in common with a sequence than its neighbour
    for before, after in pairwise(order):
        shared[after] = max(_common(tokens[slice(*spans[before])], tokens[slice(*spans[after])]) - 1, 0)
    lengths = np.diff(starts)
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    own = place >= np.repeat(shared, lengths)
    back = np.cumsum(own) - 1
    for before, after in pairwise(order):
        (source, _), (target, _), count = spans[before], spans[after], shared[after]
        back[target : target + count] = back[source : source + count]
    return SharedPrefixes(shared, np.flatnonzero(own), back)


def _common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Returns how many tokens two sequences have in common at their beginnings."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
