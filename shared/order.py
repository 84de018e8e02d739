"""The order in which a file's rows are used: epoch after epoch, each shuffled by seed + epoch. A running number alone gives its row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class EpochOrder:
    """Rows of a file of ``size`` rows by running number, the same after any restart.

    Args:
        shuffle: each epoch in an order of its own, drawn from ``seed + epoch``; else file order.
    """

    def __init__(self, size: int, shuffle: bool, seed: int) -> None:
        self._size, self._shuffle, self._seed = size, shuffle, seed
        self._epoch = -1
        self._rows: NDArray[np.int64] = np.arange(size)

    def row(self, number: int) -> int:
        """The row (from 0) that is used as number ``number`` (from 0)."""
        epoch, place = divmod(number, self._size)
        if self._shuffle and epoch != self._epoch:
            self._rows = np.random.default_rng(self._seed + epoch).permutation(self._size)
            self._epoch = epoch
        return int(self._rows[place])
