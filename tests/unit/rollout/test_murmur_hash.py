"""The hash that seeded samples are drawn by: the values of the published algorithm."""

import numpy as np

from services.rollout.engine.murmur_hash import murmur_hash32

PUBLISHED = [
    # (seed, position, column), and what mmh3.hash(struct.pack("<QII", ...), 0, signed=False) gives
    ((0, 0, 0), 2167721464),
    ((42, 0, 0), 1868632036),
    ((42, 7, 95), 2125376897),
    ((2**31 - 1, 1_000_000, 150_000), 3145061007),
    ((2**40 + 3, 12, 5), 1677208435),
]


def test_it_is_murmur_hash_3() -> None:
    seeds, positions, columns = (np.array([key[at] for key, _ in PUBLISHED], np.int64) for at in range(3))
    hashes = murmur_hash32(seeds, positions, columns)
    assert hashes.dtype == np.uint32
    assert hashes.diagonal().tolist() == [value for _, value in PUBLISHED]
