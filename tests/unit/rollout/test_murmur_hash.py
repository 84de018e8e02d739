"""The hash that seeded samples are drawn by: the values of the published algorithm."""

import pytest
import torch

from services.rollout.engine.murmur_hash import murmur_hash32

PUBLISHED = [
    # (seed, position, column), and what mmh3.hash(struct.pack("<QII", ...), 0, signed=False) gives
    ((0, 0, 0), 2167721464),
    ((42, 0, 0), 1868632036),
    ((42, 7, 95), 2125376897),
    ((2**31 - 1, 1_000_000, 150_000), 3145061007),
    ((2**40 + 3, 12, 5), 1677208435),
]


@pytest.mark.parametrize("kind", [torch.int64, torch.uint64])
def test_it_is_murmur_hash_3(kind: torch.dtype) -> None:
    seeds, positions, columns = (torch.tensor([key[at] for key, _ in PUBLISHED]) for at in range(3))
    hashes = murmur_hash32(seeds.to(kind), positions, columns)
    assert hashes.dtype == torch.uint32
    assert [int(hashes[at, at]) for at in range(len(PUBLISHED))] == [value for _, value in PUBLISHED]
