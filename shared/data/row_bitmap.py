"""Which rows of a file are used, one bit a row, and the k-th of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 512
"""Bytes between two counts: the k-th kept row is found by a search over counts and a look at one block."""

_ONES: NDArray[np.int64] = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1).astype(np.int64)
"""Bits that are set in each byte, int64 [256]."""


class RowBitmap:
    """Kept rows of ``size``. ``bits``: uint8 [ceil(size / 8)], row r in bit 7 - r % 8 of byte r // 8."""

    def __init__(self, bits: NDArray[np.uint8], size: int) -> None:
        self.bits, self.size = bits, size
        blocks = [_ONES[bits[start : start + _BLOCK]].sum() for start in range(0, len(bits), _BLOCK)]
        self._before: NDArray[np.int64] = np.cumsum([0, *blocks], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._before[-1])

    def row(self, index: int) -> int:
        """The row of the kept one number ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        block = int(np.searchsorted(self._before, index, side="right")) - 1
        bits = np.unpackbits(self.bits[block * _BLOCK : (block + 1) * _BLOCK])
        return block * _BLOCK * 8 + int(np.flatnonzero(bits)[index - int(self._before[block])])

    def below(self, row: int) -> int:
        """How many rows before ``row`` are kept."""
        block, rest = divmod(min(row, self.size), _BLOCK * 8)
        bits = np.unpackbits(self.bits[block * _BLOCK : (block + 1) * _BLOCK])
        return int(self._before[block]) + int(bits[:rest].sum())


class RowMarks:
    """Rows marked one after the other, to become a `RowBitmap`. ``size``: how many there will be."""

    def __init__(self, size: int) -> None:
        self._bits: NDArray[np.uint8] = np.full((size + 7) // 8, 0xFF, np.uint8)
        self._size = size
        if size % 8:
            self._bits[-1] = (0xFF00 >> size % 8) & 0xFF

    def leave_out(self, row: int) -> None:
        self._bits[row // 8] &= 0xFF ^ (0x80 >> row % 8)

    def kept(self) -> RowBitmap:
        return RowBitmap(self._bits, self._size)
