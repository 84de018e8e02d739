"""MurmurHash3 (Austin Appleby, public domain; the 32-bit variant, seed 0) of the 16 bytes that SGLang generates a token by."""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]  # their sums and products are those of 32 bits


def murmur_hash32(seed: NDArray[np.int64], positions: NDArray[np.int64], columns: NDArray[np.int64]) -> Words:
    """Returns the hash of each row's seed (64 bits) and position with each column's index (32 bits each): uint32 [rows, columns]. ``seed``,
    ``positions``: [rows]. ``columns``: [columns]."""
    state = np.zeros((1, 1), np.uint32)
    for given in (seed[:, None], seed[:, None] >> 32, positions[:, None], columns[None, :]):
        word = _rotated(given.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        state = _rotated(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    state = state ^ np.uint32(16)  # the bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
    return state ^ (state >> np.uint32(16))


def _rotated(words: Words, bits: int) -> Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
