"""Frozen weights beside the policy's: a copy in host memory that takes the parameters' place for a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.checkpoint import load_weights
from services.trainer.megatron.model import Model
from services.trainer.megatron.weights import load_hf, weights_of


class FrozenWeights:
    """A copy of a model's parameters, pinned to no version: whoever made it knows what it holds.

    Args:
        tensors: this rank's parameters, in the order of ``parameters()``, in host memory.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    @classmethod
    def of(cls, model: Model) -> FrozenWeights:
        """The model's weights as they are now."""
        copies = [_on_host(tensor) for tensor in _parameters(model)]
        if DEVICE_TYPE == "cuda":
            torch.cuda.current_stream().synchronize()
        return cls(copies)

    @classmethod
    def from_hf(cls, model: Model, directory: Path) -> FrozenWeights:
        """The weights of a Hugging Face checkpoint of the same architecture; the model's own stay as they are."""
        return cls._loaded(model, lambda: load_hf(model.modules, model.config, model.architecture, directory))

    @classmethod
    def from_checkpoint(cls, model: Model, root: Path, step: int | None = None) -> FrozenWeights:
        """The weights of a training checkpoint of the same architecture, whatever its layout; the newest below ``root`` if
        ``step`` is None. The model's own stay as they are. A collective of all ranks.

        Raises:
            CheckpointMissing: there is none (of this step). ConfigError: it is of another model or dtype.
        """
        return cls._loaded(model, lambda: load_weights(model, root, step))

    @classmethod
    def _loaded(cls, model: Model, load: Callable[[], None]) -> FrozenWeights:
        own = cls.of(model)
        try:
            load()
            return cls.of(model)
        finally:
            own._copy_into(model)

    @contextlib.contextmanager
    def in_place_of(self, model: Model) -> Iterator[None]:
        """The model has these weights in the body, and its own ones back after it."""
        own = FrozenWeights.of(model)
        self._copy_into(model)
        try:
            yield
        finally:
            own._copy_into(model)

    @torch.no_grad()
    def _copy_into(self, model: Model) -> None:
        # Pinned memory is not handed out again before the copies of this stream are through, so none is waited for.
        for parameter, tensor in zip(_parameters(model), self._tensors, strict=True):
            parameter.copy_(tensor, non_blocking=True)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if DEVICE_TYPE == "cpu":
        return tensor.detach().clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


def _parameters(model: Model) -> list[torch.Tensor]:
    return [tensor for chunk in model.modules for _, tensor in weights_of(chunk)]
