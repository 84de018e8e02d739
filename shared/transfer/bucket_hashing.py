"""The digests of a push's tensors, taken bucket by bucket as they pass: on the CPU at once, on a GPU in the current stream's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.transfer import digest
from shared.transfer.digest import TensorDigest
from shared.transfer.manifest import Bucket


class Hasher:
    """Of one sequence of pushes. No torch here: tensors come from outside.

    Args:
        to_device: a copy of an int64 array on the buckets' device.
    """

    def __init__(self, to_device: Callable[[NDArray[np.int64]], Any]) -> None:
        self._to_device = to_device
        self._tables: dict[int, tuple[Bucket, Any]] = {}
        self._found: list[tuple[Bucket, Any]] = []

    def take(self, bucket: Bucket, flat: Any) -> None:
        """Args: flat: uint8 tensor [bucket.nbytes]; on a GPU it must not be written again before this stream has come so far."""
        if flat.is_cuda:
            from shared.transfer import digest_kernel

            self._found.append((bucket, digest_kernel.leaves(flat, self._table(bucket, flat.is_cuda))))
        else:
            self._found.append((bucket, digest.leaves(flat.numpy(), self._table(bucket, flat.is_cuda))))

    def known(self) -> dict[str, TensorDigest]:
        """The tensors of all buckets since the last call. On a GPU it waits for them."""
        found, self._found = self._found, []
        known: dict[str, TensorDigest] = {}
        for bucket, leaves in found:
            values = leaves if isinstance(leaves, np.ndarray) else leaves.cpu().numpy().view(np.uint64)
            known |= digest.tensors(bucket, values)
        return known

    def _table(self, bucket: Bucket, on_device: bool) -> Any:
        """Kept: the buckets of a run are the same at every push."""
        kept = self._tables.get(id(bucket))
        if kept is None or kept[0] is not bucket:
            table = digest.leaf_table(bucket)
            kept = self._tables[id(bucket)] = (bucket, self._to_device(table) if on_device else table)
        return kept[1]
