"""The digest of a version of the weights: xxh3 over its tensors, the same however they are cut into buckets, files or ranks.

A tensor's bytes are cut into leaves of `LEAF_BYTES`, the last one filled up with zeros; each leaf has its xxh3 of 64 bits, seed 0; a
tensor's digest is the xxh3 of 64 bits of its leaves', little-endian. Leaves of one fixed size are what a GPU can hash in parallel:
`shared.transfer.digest_kernel`. A version's digest is the xxh3 of 128 bits over all names, dtypes, shapes and tensors' digests.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared.transfer.manifest import Bucket, checked_tensor

LEAF_BYTES = 65_536


class TensorDigest(NamedTuple):
    """A tensor's part in a version's digest. ``digest``: of its bytes. It is a list in JSON."""

    dtype: str
    shape: tuple[int, ...]
    digest: int


def decoded_digests(fields: Mapping[str, Sequence[Any]]) -> dict[str, TensorDigest]:
    """Returns the digests of tensors that have travelled as JSON. Raises TypeError, ValueError."""
    found = {}
    for name, (dtype, shape, digest) in fields.items():
        if type(digest) is not int or not 0 <= digest < 2**64:
            raise ValueError(f"{name}: digest {str(digest)[:100]!r}")
        found[name] = TensorDigest(*checked_tensor(name, dtype, shape)[1:], digest)
    return found


def leaf_table(bucket: Bucket) -> NDArray[np.int64]:
    """Returns where the leaves of a bucket lie: int64 [leaves, 2], first byte and number of bytes (at most `LEAF_BYTES`), slot by slot."""
    return _table((slot.offset, slot.nbytes) for slot in bucket.slots)


def leaves(flat: Any, table: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns the leaves' digests: uint64 [leaves].

    Args:
        flat: a bucket's bytes, anything with the buffer protocol. table: of `leaf_table`.
    """
    view = memoryview(flat).cast("B")
    found = np.empty(len(table), dtype=np.uint64)
    for index, (start, length) in enumerate(table.tolist()):
        part = view[start : start + length]
        found[index] = xxhash.xxh3_64_intdigest(part if length == LEAF_BYTES else bytes(part).ljust(LEAF_BYTES, b"\0"))
    return found


def tensors(bucket: Bucket, found: NDArray[np.uint64]) -> dict[str, TensorDigest]:
    """Returns the tensors of a bucket, from the digests of its leaves in the order of `leaf_table`."""
    known, first = {}, 0
    for slot in bucket.slots:
        count = -(-slot.nbytes // LEAF_BYTES)
        known[slot.name] = TensorDigest(slot.dtype, slot.shape, _of_leaves(found[first : first + count]))
        first += count
    return known


def of_bytes(data: Any) -> int:
    """Returns a tensor's digest, from its bytes: anything with the buffer protocol."""
    view = memoryview(data).cast("B")
    return _of_leaves(leaves(view, _table([(0, len(view))])))


def version_digest(known: Mapping[str, TensorDigest]) -> str:
    """Returns a version's digest, 32 hexadecimal digits."""
    lines = [b"%b%016x\n" % (_head(name, tensor.dtype, tensor.shape), tensor.digest) for name, tensor in sorted(known.items())]
    return xxhash.xxh3_128_hexdigest(b"".join(lines))


@functools.lru_cache(maxsize=1 << 18)
def _head(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Returns what a version's digest covers of a tensor beside its bytes: the same at every push."""
    return f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode()


def _table(extents: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    rows = [(at, min(LEAF_BYTES, first + size - at)) for first, size in extents for at in range(first, first + size, LEAF_BYTES)]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _of_leaves(found: NDArray[np.uint64]) -> int:
    return xxhash.xxh3_64_intdigest(found.astype("<u8").tobytes())
