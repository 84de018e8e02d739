"""MurmurHash3 (Austin Appleby, public domain; the 32-bit variant, seed 0) of the 16 bytes that SGLang generates a token by."""

import numpy as np
from numpy.typing import NDArray

_MASK = np.uint64(0xFFFFFFFF)

Words = NDArray[np.uint64]  # 32-bit words in 64 bits: products do not overflow


def murmur_hash32(seed: NDArray[np.int64], positions: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Returns the hash of each row's seed (64 bits) and position with each column's index (32 bits each): uint32 [rows, columns]. ``seed``,
    ``positions``: [rows]. ``columns``: [columns]."""
    seeds, places, ids = (given.astype(np.uint64) for given in (seed, positions, columns))
    state = np.zeros((len(seeds), 1), np.uint64)
    for word in (seeds & _MASK, seeds >> np.uint64(32), places & _MASK):
        state = _mixed(state, word[:, None])
    return _ended(_mixed(state, (ids & _MASK)[None, :]), length=16).astype(np.uint32)


def _rotated(words: Words, bits: int) -> Words:
    return ((words << np.uint64(bits)) | (words >> np.uint64(32 - bits))) & _MASK


def _times(words: Words, factor: int) -> Words:
    return (words * np.uint64(factor)) & _MASK


def _mixed(state: Words, word: Words) -> Words:
    state = _rotated(state ^ _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593), 13)
    return (_times(state, 5) + np.uint64(0xE6546B64)) & _MASK


def _ended(state: Words, length: int) -> Words:
    state = state ^ np.uint64(length)
    state = _times(state ^ (state >> np.uint64(16)), 0x85EBCA6B)
    state = _times(state ^ (state >> np.uint64(13)), 0xC2B2AE35)
    return state ^ (state >> np.uint64(16))
