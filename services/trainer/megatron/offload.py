"""Offload of a model and its optimizer to host memory while engines generate on the GPU, and onload for the next step.

Storages are moved, not tensors: Megatron's parameters and gradients are views of a few large buffers, and much else refers to such
views. A storage is emptied in place and filled again, so that every view of it is valid afterwards, with the same bits.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.optimizer import Optimizer

Part = Literal["optimizer", "weights"]


class _Storage:
    """One storage: on its device, or as a copy in host memory. ``keeps``: whether its content is kept; gradients' is not."""

    def __init__(self, tensor: Tensor, keeps: bool) -> None:
        self._storage, self._keeps = tensor.untyped_storage(), keeps
        self._bytes = self._storage.nbytes()
        self._host: Tensor | None = None  # stays allocated after an onload: pinning memory takes longer than the copy

    @property
    def nbytes(self) -> int:
        return self._bytes

    def copy_out(self) -> None:
        if not self._keeps:
            return
        if self._host is None:
            self._host = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=self._storage.device.type == "cuda")
        self._host.copy_(_bytes_of(self._storage), non_blocking=True)

    def empty(self) -> None:
        self._storage.resize_(0)

    def fill(self) -> None:
        self._storage.resize_(self._bytes)
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

    def __init__(self, model: MegatronModel, optimizer: Optimizer) -> None:
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
        found = list(self._weights() if part == "weights" else self._optimizer_state())
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

    # --- what there is

    def _weights(self) -> Iterator[_Storage]:
        yield from self._distinct(self._weight_tensors(), keeps=True, known=set())

    def _optimizer_state(self) -> Iterator[_Storage]:
        """Yields the optimizer's storages that are not the weights': in float32 an optimizer updates views of the parameters."""
        known = {_key(tensor) for tensor in self._weight_tensors()}
        yield from self._distinct(self._optimizer_tensors(), keeps=True, known=known)
        yield from self._distinct(self._gradient_tensors(), keeps=False, known=known)

    def _weight_tensors(self) -> Iterator[Tensor]:
        for chunk in self._model.chunks:
            yield from chunk.module.parameters()
            yield from chunk.module.buffers()
            yield from (buffer.param_data for buffer in _flat_buffers(chunk) if buffer.param_data is not None)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for part in self._optimizer.parts().values():
            inner = part.optimizer
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _gradient_tensors(self) -> Iterator[Tensor]:
        for chunk in self._model.chunks:
            yield from (buffer.grad_data for buffer in _flat_buffers(chunk))

    def _distinct(self, tensors: Iterable[Tensor], keeps: bool, known: set[int]) -> Iterator[_Storage]:
        """Yields each storage on the model's device once, and those of ``known`` not at all."""
        device = next(self._model.chunks[0].module.parameters()).device
        for tensor in tensors:
            key = _key(tensor)
            if key in known or tensor.device != device or not tensor.untyped_storage().nbytes():
                continue
            known.add(key)
            yield self._storage(tensor, keeps, key)

    def _storage(self, tensor: Tensor, keeps: bool, key: int) -> _Storage:
        held = self._known.get((key, keeps))
        if held is None or held.nbytes != tensor.untyped_storage().nbytes():
            held = self._known[key, keeps] = _Storage(tensor, keeps)
        return held


def _key(tensor: Tensor) -> int:
    """Returns a key that identifies the storage while it lives; the holder of the key must keep the storage alive."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns a uint8 view of a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _flat_buffers(chunk: Any) -> list[Any]:
    """Returns Megatron's flat buffers of parameters and gradients."""
    return [*getattr(chunk, "buffers", []), *getattr(chunk, "expert_parallel_buffers", [])]


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
