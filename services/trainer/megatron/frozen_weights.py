"""Frozen weights beside the policy's: a copy in host memory that takes the parameters' place for a forward pass."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.hf_weights import load_hf, weights_of
from services.trainer.megatron.lora import ADAPTER_DIRECTORY, load_adapters, silence_adapters
from services.trainer.megatron.runtime import host_copy


class FrozenWeights:
    """A copy of a model's parameters. It records no version.

    Args:
        tensors: this rank's parameters, in the order of ``parameters()``, in host memory. adapters: whether they are only those
            of LoRA's adapters: the weights under them are the same in every policy of a run.
    """

    def __init__(self, tensors: list[torch.Tensor], adapters: bool = False) -> None:
        self._tensors, self._adapters = tensors, adapters

    @classmethod
    def of(cls, model: MegatronModel, adapters: bool = False) -> "FrozenWeights":
        """Returns the model's weights as they are now."""
        copies = [host_copy(tensor) for tensor in _parameters(model, adapters)]
        if DEVICE_TYPE == "cuda":
            torch.cuda.current_stream().synchronize()
        return cls(copies, adapters)

    @classmethod
    def of_policy(cls, model: MegatronModel) -> "FrozenWeights":
        """Returns the policy as it is now; for a model with adapters, these are enough."""
        return cls.of(model, adapters=model.lora is not None)

    @classmethod
    def of_saved_policy(cls, model: MegatronModel, directory: Path) -> "FrozenWeights":
        """Returns an earlier policy of this model, from the directory that `Actor.save_hf` wrote then."""
        if model.lora is None:
            return cls.from_hf(model, directory)
        return cls._loaded(model, lambda: load_adapters(model, directory / ADAPTER_DIRECTORY), adapters=True)

    @classmethod
    def from_hf(cls, model: MegatronModel, directory: Path) -> "FrozenWeights":
        """Returns the weights of a Hugging Face checkpoint of the same architecture, with adapters that add nothing to them; the model's
        own stay as they are."""

        def load() -> None:
            load_hf(model.modules, model.config, model.architecture, directory)
            silence_adapters(model)

        return cls._loaded(model, load)

    @classmethod
    def _loaded(cls, model: MegatronModel, load: Callable[[], None], adapters: bool = False) -> "FrozenWeights":
        own = cls.of(model, adapters)
        try:
            load()
            return cls.of(model, adapters)
        finally:
            own._copy_into(model)

    @contextlib.contextmanager
    def in_place_of(self, model: MegatronModel) -> Iterator[None]:
        """Gives the model these weights in the body, and its own ones after it."""
        own = FrozenWeights.of(model, self._adapters)
        self._copy_into(model)
        try:
            yield
        finally:
            own._copy_into(model)

    @torch.no_grad()
    def _copy_into(self, model: MegatronModel) -> None:
        model.readers.wait("change of weights")
        # Pinned memory is not handed out again before the copies of this stream are through, so none is waited for.
        for parameter, tensor in zip(_parameters(model, self._adapters), self._tensors, strict=True):
            parameter.copy_(tensor, non_blocking=True)


def _parameters(model: MegatronModel, adapters: bool) -> list[torch.Tensor]:
    held = [tensor for chunk in model.modules for _, tensor in weights_of(chunk)]
    return [tensor for tensor in held if getattr(tensor, "adapter", False)] if adapters else held
