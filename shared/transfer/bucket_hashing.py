"""The digests of a push's tensors, taken bucket by bucket as they pass, at both ends in the same way."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from shared.transfer import digest
from shared.transfer.digest import TensorDigest
from shared.transfer.manifest import Manifest


class ManifestHasher:
    """Hashes the buckets of one manifest, at every push anew: on a CPU at once, on a GPU in the current stream's order."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._buckets = manifest.buckets
        self._tables = [torch.from_numpy(digest.leaf_table(bucket)).to(device) for bucket in manifest.buckets]
        self._leaves: list[Tensor] = []  # on the host, where the device's results go
        if device.type == "cuda":
            self._leaves = [torch.empty(len(table), dtype=torch.int64, pin_memory=True) for table in self._tables]
        self.begin()

    def begin(self) -> None:
        """Resets the state of the previous push."""
        self._found: dict[str, TensorDigest] = {}
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()

    def take(self, index: int, flat: Tensor) -> None:
        """Hashes bucket ``index``: uint8 [bytes]. On a GPU it must not be written again before this stream has come so far."""
        if not flat.is_cuda:
            self._note(index, digest.leaves(flat.numpy(), self._tables[index].numpy()))
            return
        from shared.transfer import digest_kernel  # needs Triton, which machines without a GPU need not have

        self._leaves[index].copy_(digest_kernel.leaves(flat, self._tables[index]), non_blocking=True)
        hashed = torch.cuda.Event()
        hashed.record()
        self._pending.append((index, hashed))

    def poll(self) -> None:
        """Collects the digests that the device has finished."""
        while self._pending and self._pending[0][1].query():
            self._take_up()

    def digests(self) -> dict[str, TensorDigest]:
        """Returns the tensors of all buckets that were taken, once the device has hashed them."""
        while self._pending:
            self._pending[0][1].synchronize()
            self._take_up()
        return self._found

    def _take_up(self) -> None:
        index, _ = self._pending.popleft()
        self._note(index, self._leaves[index].numpy().view(np.uint64))

    def _note(self, index: int, leaves: np.typing.NDArray[np.uint64]) -> None:
        self._found |= digest.tensors(self._buckets[index], leaves)
