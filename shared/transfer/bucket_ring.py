"""Buckets as torch tensors: flat buffers in turn, the tensors in one, their digests; `services.trainer.weights.stage_sender` sends them."""

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from shared.transfer import digest
from shared.transfer.digest import TensorDigest
from shared.transfer.manifest import Bucket, Manifest, Slot

BUFFERS = 4  # flat buffers of an end: one is filled or loaded while three are on their way, or arrive before an engine is paused


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype of a name as manifests have it."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def slot_view(flat: Tensor, slot: Slot) -> Tensor:
    """Returns a tensor's part of a flat buffer, in its own dtype and shape."""
    return flat[slot.offset : slot.offset + slot.nbytes].view(torch_dtype(slot.dtype)).view(slot.shape)


def bucket_views(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a bucket by name, as they lie in its flat buffer."""
    for slot in bucket.slots:
        yield slot.name, slot_view(flat, slot)


class BucketRing:
    """The flat buffers that the buckets of a channel take in turn, uint8 each; they are kept between pushes.

    Args:
        device: of the buffers. count: how many there are, unless a push has fewer buckets. allocate: makes buffers of so many bytes.
    """

    def __init__(self, device: torch.device, count: int = BUFFERS, allocate: Callable[[int], Tensor] | None = None) -> None:
        self._count = count
        self._allocate = allocate or (lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device))
        self.buffers: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.buffers)

    def reserve(self, manifest: Manifest) -> bool:
        """Allocates buffers for the manifest's buckets if needed, each for those that take it. Returns whether there are new ones."""
        count = max(len(self.buffers), min(self._count, len(manifest.buckets)))
        needed = [max((bucket.nbytes for bucket in manifest.buckets[first::count]), default=0) for first in range(count)]
        held = [buffer.numel() for buffer in self.buffers]
        if any(nbytes > size for nbytes, size in zip(needed, held, strict=False)):
            self.buffers = []
        before = len(self.buffers)
        with torch.inference_mode(False):  # SGLang's loop runs in it, and what it makes cannot be written outside
            for slot in range(before, count):  # what an earlier manifest needed will be needed again
                self.buffers.append(self._allocate(max([needed[slot], *held[slot : slot + 1]])))
        return len(self.buffers) > before

    def flat(self, index: int, nbytes: int) -> Tensor:
        """Returns the buffer of bucket ``index``: uint8 [nbytes]."""
        return self.buffers[index % len(self.buffers)][:nbytes]

    def forget(self) -> None:
        """Releases the buffers; the next ones are new."""
        self.buffers = []


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
            self._collect_digest()

    def digests(self) -> dict[str, TensorDigest]:
        """Returns the tensors of all buckets that were taken, once the device has hashed them."""
        while self._pending:
            self._pending[0][1].synchronize()
            self._collect_digest()
        return self._found

    def _collect_digest(self) -> None:
        index, _ = self._pending.popleft()
        self._note(index, self._leaves[index].numpy().view(np.uint64))

    def _note(self, index: int, leaves: np.typing.NDArray[np.uint64]) -> None:
        self._found |= digest.tensors(self._buckets[index], leaves)
