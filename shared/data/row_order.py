"""The order in which rows are used: epoch after epoch, each shuffled by seed + epoch, so that a running number alone gives its row."""

import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

_ROUNDS = 6
_MASK = (1 << 64) - 1


class FeistelPermutation:
    """A pseudo-random permutation of ``range(size)`` in constant memory.

    A Feistel network over the least even number of bits that holds ``size``, walked until it lands inside (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"): four steps on average at most.
    """

    def __init__(self, size: int, *seed: int) -> None:
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        self._keys = [int(key) for key in np.random.default_rng(seed).integers(0, _MASK, size=_ROUNDS, dtype=np.uint64, endpoint=True)]

    def __getitem__(self, index: int) -> int:
        while True:
            left, right = index >> self._half, index & self._low
            for key in self._keys:
                mixed = ((right ^ key) * 0x9E3779B97F4A7C15) & _MASK  # the multiplier of splitmix64; its high bits are the mixed ones
                mixed = ((mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9) & _MASK
                left, right = right, left ^ (mixed >> 40 & self._low)
            index = left << self._half | right
            if index < self._size:
                return index


_permutation = lru_cache(maxsize=256)(FeistelPermutation)


class MixedOrder:
    """Rows of several files, one after the other, by running number: an epoch draws from each as often as its weight says.

    File i of n rows gives c = round(weight × n) rows to an epoch: the next c of its own endless sequence of passes over itself. So
    the rows of a file are used equally often, to within one, whatever its weight. With ``shuffle`` the epoch is shuffled as a whole
    by seed + epoch, and each pass over a file whose passes do not end with epochs is shuffled too, by seed, file and pass; without,
    files come one after the other, in file order. Files of weight 1 are used as one file that holds them all.

    Args:
        sizes: rows of each file. weights: of each.

    Raises ValueError where a file with rows has a weight that rounds to none.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], shuffle: bool, seed: int) -> None:
        self._sizes, self._shuffle, self._seed = list(sizes), shuffle, seed
        self.counts = [round(weight * size) for weight, size in zip(weights, sizes, strict=True)]
        for size, count, weight in zip(sizes, self.counts, weights, strict=True):
            if size and not count:
                raise ValueError(f"the weight {weight:g} of {size} prompts rounds to none of them an epoch")
        self._first_rows = list(accumulate(self._sizes, initial=0))  # of each file
        self._first_slots = list(accumulate(self.counts, initial=0))  # of each file in an epoch
        self.epoch_size = self._first_slots[-1]

    def row(self, number: int) -> int:
        """Returns the row (from 0, over all files) that is used as ``number`` (from 0), the same after any restart."""
        epoch, slot = divmod(number, self.epoch_size)
        if self._shuffle:
            slot = _permutation(self.epoch_size, self._seed + epoch)[slot]
        file = bisect.bisect_right(self._first_slots, slot) - 1
        size, count = self._sizes[file], self.counts[file]
        file_pass, row = divmod(epoch * count + slot - self._first_slots[file], size)
        if self._shuffle and count % size:
            row = _permutation(size, self._seed, file, file_pass)[row]
        return self._first_rows[file] + row
