"""Offload of a model and its optimizer to host memory while engines generate on the GPU, and onload for the next step.

Storages are moved, not tensors: Megatron's parameters and gradients are views of a few large buffers, and much else refers to such
views. A storage is emptied in place and filled again, so that every view of it is valid afterwards, with the same bits.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from services.trainer.parallel.trained_model import TrainedModel
from services.trainer.scheduled_optimizer import ScheduledOptimizer

Part = Literal["optimizer", "weights"]


class _Storage:
    """One storage: on its device, or as a copy in host memory. ``keeps``: whether its content is kept; gradients' is not."""

    def __init__(self, tensor: Tensor, keeps: bool) -> None:
        self._storage, self._keeps = tensor.untyped_storage(), keeps
        self.nbytes = self._storage.nbytes()
        self._host: Tensor | None = None  # stays allocated after an onload: pinning memory takes longer than the copy

    def copy_out(self) -> None:
        if not self._keeps:
            return
        if self._host is None:
            self._host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._storage.device.type == "cuda")
        self._host.copy_(_bytes_of(self._storage), non_blocking=True)

    def empty(self) -> None:
        self._storage.resize_(0)

    def fill(self) -> None:
        self._storage.resize_(self.nbytes)
        content = _bytes_of(self._storage)
        if self._host is None:
            content.zero_()
        else:
            content.copy_(self._host, non_blocking=True)


class Offload:
    """One rank's part of a model and its optimizer. Everything is on the device at first.

    Two parts: ``weights``, which a push reads, and ``optimizer``: its moments, its float32 weights, and the gradients, which are not
    kept. No method is a collective: each rank moves its own part.
    """

    def __init__(self, model: TrainedModel, optimizer: ScheduledOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._away: dict[Part, list[_Storage]] = {}
        self._known: dict[tuple[int, bool], _Storage] = {}

    @property
    def away(self) -> frozenset[Part]:
        """Returns the parts that are in host memory now."""
        return frozenset(self._away)

    def to_host(self, part: Part) -> int:
        """Moves a part to host memory unless it is there already. Returns the bytes freed on the device."""
        if part in self._away:
            return 0
        self._model.readers.wait("offloading")
        if part == "optimizer":
            self._optimizer.zero_gradients()
        found = list(self._storages(part))
        for storage in found:
            storage.copy_out()
        _synchronize()
        for storage in found:
            storage.empty()
        self._away[part] = found
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # back to the device's allocator, so that an engine can use it
        return sum(storage.nbytes for storage in found)

    def to_device(self) -> None:
        """Moves everything back to the device."""
        for storage in [one for part in self._away.values() for one in part]:
            storage.fill()
        self._away.clear()
        _synchronize()

    def _storages(self, part: Part) -> Iterator[_Storage]:
        """Yields each storage of a part on the model's device once. In float32 an optimizer updates views of the weights, which stay
        theirs."""
        device = self._model.weight_tensors()[0].device
        weights = {_key(tensor): (tensor, True) for tensor in self._model.live_tensors()}
        held: dict[int, tuple[Tensor, bool]] = {}
        for tensor, keeps in weights.values() if part == "weights" else self._optimizer.live_tensors(self._model):
            if part == "weights" or _key(tensor) not in weights:
                held.setdefault(_key(tensor), (tensor, keeps))
        for key, (tensor, keeps) in held.items():
            if tensor.device == device and (nbytes := tensor.untyped_storage().nbytes()):
                known = self._known.get((key, keeps))
                if known is None or known.nbytes != nbytes:
                    known = self._known[key, keeps] = _Storage(tensor, keeps)
                yield known


def _key(tensor: Tensor) -> int:
    """Returns a key that identifies the storage while it lives; the holder of the key must keep the storage alive."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
