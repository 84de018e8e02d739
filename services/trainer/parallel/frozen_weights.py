"""Frozen weights beside the policy's."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from services.trainer.parallel import DEVICE_TYPE
from services.trainer.parallel.export import ADAPTER_DIRECTORY
from services.trainer.parallel.runtime import host_copy
from services.trainer.parallel.trained_model import TrainedModel


class FrozenWeights:
    """A copy of a model's parameters. It records no version.

    Args:
        tensors: this rank's parameters, in the order of ``parameters()``, in host memory. adapters: whether they are only those
            of LoRA's adapters: the weights under them are the same in every policy of a run.
    """

    def __init__(self, tensors: list[torch.Tensor], adapters: bool = False) -> None:
        self._tensors, self._adapters = tensors, adapters

    @classmethod
    def of(cls, model: TrainedModel, adapters: bool = False) -> "FrozenWeights":
        """Returns the model's weights as they are now."""
        copies = [host_copy(tensor) for tensor in model.weight_tensors(adapters)]
        if DEVICE_TYPE == "cuda":
            torch.cuda.current_stream().synchronize()
        return cls(copies, adapters)

    @classmethod
    def of_policy(cls, model: TrainedModel) -> "FrozenWeights":
        """Returns the policy as it is now; for a model with adapters, these are enough."""
        return cls.of(model, adapters=model.lora is not None)

    @classmethod
    def of_saved_policy(cls, model: TrainedModel, directory: Path) -> "FrozenWeights":
        """Returns an earlier policy of this model, from the directory that `Actor.save_hf` wrote then."""
        if model.lora is None:
            return cls.from_hf(model, directory)
        return cls._loaded(model, lambda: model.load_adapters(directory / ADAPTER_DIRECTORY), adapters=True)

    @classmethod
    def from_hf(cls, model: TrainedModel, directory: Path) -> "FrozenWeights":
        """Returns the weights of a Hugging Face checkpoint of the same architecture, with adapters that add nothing to them; the model's
        own stay as they are."""

        def load() -> None:
            model.load_hf(directory)
            if model.lora is not None:
                model.silence_adapters()

        return cls._loaded(model, load)

    @classmethod
    def _loaded(cls, model: TrainedModel, load: Callable[[], None], adapters: bool = False) -> "FrozenWeights":
        own = cls.of(model, adapters)
        try:
            load()
            return cls.of(model, adapters)
        finally:
            own._copy_into(model)

    @contextlib.contextmanager
    def in_place_of(self, model: TrainedModel) -> Iterator[None]:
        """Gives the model these weights in the body, and its own ones after it."""
        own = FrozenWeights.of(model, self._adapters)
        self._copy_into(model)
        try:
            yield
        finally:
            own._copy_into(model)

    @torch.no_grad()
    def _copy_into(self, model: TrainedModel) -> None:
        model.readers.wait("change of weights")
        # Pinned memory is not handed out again before the copies of this stream are through, so none is waited for.
        for parameter, tensor in zip(model.weight_tensors(self._adapters), self._tensors, strict=True):
            parameter.copy_(tensor, non_blocking=True)
