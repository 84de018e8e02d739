"""Buckets as torch tensors: the flat buffers that they take in turn, and the tensors in one."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shared.transfer.manifest import Bucket, Manifest, Slot

BUFFERS = 4
"""Flat buffers of an end: one is filled or loaded while three are on their way, or arrive before an engine is paused."""


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
