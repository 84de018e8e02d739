"""What a version of the weights is known by: xxh3 over its tensors, the same however they are cut into buckets, files or ranks.

A tensor's bytes are cut into leaves of `LEAF_BYTES`, the last one filled up with zeros; each leaf has its xxh3 of 64 bits, seed 0; a
tensor's digest is the xxh3 of 64 bits of its leaves', little-endian. Leaves of one fixed size are what a GPU can hash in parallel:
`shared.transfer.digest_kernel`. A version's digest is the xxh3 of 128 bits over all names, dtypes, shapes and tensors' digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared.transfer.manifest import Bucket

LEAF_BYTES = 65_536


@dataclass(frozen=True)
class TensorDigest:
    """A tensor as a version's digest knows it. ``digest``: of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: int


def leaf_table(bucket: Bucket) -> NDArray[np.int64]:
    """Where the leaves of a bucket lie: int64 [leaves, 2], first byte and number of bytes (at most `LEAF_BYTES`), slot by slot."""
    rows = [
        (start, min(LEAF_BYTES, slot.offset + slot.nbytes - start))
        for slot in bucket.slots
        for start in range(slot.offset, slot.offset + slot.nbytes, LEAF_BYTES)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def leaves(flat: Any, table: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The leaves' digests: uint64 [leaves].

    Args:
        flat: a bucket's bytes, anything with the buffer protocol. table: of `leaf_table`.
    """
    view = memoryview(flat).cast("B")
    found = np.empty(len(table), dtype=np.uint64)
    for number, (start, length) in enumerate(table.tolist()):
        part = view[start : start + length]
        found[number] = xxhash.xxh3_64_intdigest(part if length == LEAF_BYTES else bytes(part).ljust(LEAF_BYTES, b"\0"))
    return found


def tensors(bucket: Bucket, found: NDArray[np.uint64]) -> dict[str, TensorDigest]:
    """The tensors of a bucket, from the digests of its leaves in the order of `leaf_table`."""
    known, first = {}, 0
    for slot in bucket.slots:
        count = -(-slot.nbytes // LEAF_BYTES)
        own = found[first : first + count].astype("<u8").tobytes()
        known[slot.name] = TensorDigest(slot.dtype, slot.shape, xxhash.xxh3_64_intdigest(own))
        first += count
    return known


def of_bytes(data: Any) -> int:
    """A tensor's digest, from its bytes: anything with the buffer protocol."""
    view = memoryview(data).cast("B")
    table = np.array([(start, min(LEAF_BYTES, len(view) - start)) for start in range(0, len(view), LEAF_BYTES)], dtype=np.int64)
    return xxhash.xxh3_64_intdigest(leaves(view, table.reshape(-1, 2)).astype("<u8").tobytes())


def version_digest(known: Mapping[str, TensorDigest]) -> str:
    """32 hexadecimal digits."""
    whole = xxhash.xxh3_128()
    for name in sorted(known):
        tensor = known[name]
        whole.update(f"{name}\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}\0{tensor.digest:016x}\n".encode())
    return whole.hexdigest()
