"""Frozen weights beside the policy's: a copy in host memory that takes the parameters' place for a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from services.trainer.megatron.model import Model
from services.trainer.megatron.weights import load_hf


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
        return cls([parameter.detach().to("cpu", copy=True) for parameter in _parameters(model)])

    @classmethod
    def from_hf(cls, model: Model, directory: Path) -> FrozenWeights:
        """The weights of a Hugging Face checkpoint of the same architecture; the model's own stay as they are."""
        own = cls.of(model)
        try:
            load_hf(model.modules, model.config, model.architecture, directory)
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
        for parameter, tensor in zip(_parameters(model), self._tensors, strict=True):
            parameter.copy_(tensor)


def _parameters(model: Model) -> list[torch.nn.Parameter]:
    return [parameter for chunk in model.modules for parameter in chunk.parameters()]
