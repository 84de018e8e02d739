"""The choice of parameters that train (all, those that patterns name, or LoRA's adapters), and frozen weights beside the policy's."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.hf_weights import LocalParameter, parameters
from services.trainer.megatron.lora import ADAPTER_DIRECTORY, load_adapters, silence_adapters
from services.trainer.megatron.moe import GroupedExperts
from services.trainer.megatron.runtime import deadline, gather_json, host_copy
from shared.model.architecture import Architecture
from shared.model.trainable_parameters import Freezing


def freeze(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, freezing: Freezing, lora: bool) -> None:
    """Freezes parameters that are not to train. This is a collective of all ranks, before gradients and optimizer are made.

    Args:
        lora: only adapters train.

    Raises:
        ConfigError: a pattern fits nothing, nothing is left to train, or Megatron could not compute the gradients; on every rank.
    """
    if lora:
        for parameter in [parameter for chunk in chunks for parameter in chunk.parameters()]:
            parameter.requires_grad_(getattr(parameter, "adapter", False))
    elif not freezing.nothing:
        _freeze_named(chunks, config, architecture, freezing)
    else:
        return
    for experts in [module for chunk in chunks for module in chunk.modules() if isinstance(module, GroupedExperts)]:
        experts.lay_together()
    if config.recompute_granularity is not None:
        for chunk in chunks:
            _let_gradients_begin(chunk)


def _freeze_named(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, freezing: Freezing) -> None:
    held = {_name(local, architecture): local for local in parameters(chunks, config, architecture) if _is_trained(local.parameter)}
    with deadline("the exchange of parameter names"):
        everywhere = gather_json(list(held))
    freezing.check(list(dict.fromkeys(name for each in everywhere for name in each)))
    for name, local in held.items():
        local.parameter.requires_grad_(freezing.trains(name))


def _name(local: LocalParameter, architecture: Architecture) -> str:
    """Returns a parameter's name; the last stage's copy of a tied embedding has the embedding's: they train together or not at all."""
    tied_copy = local.name == "output_layer.weight" and architecture.tied_embeddings
    return "embedding.word_embeddings.weight" if tied_copy else local.name


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)  # routers' biases are not among them: no gradient moves them


def _let_gradients_begin(chunk: GPTModel) -> None:
    """Lets inputs ask for gradients: a recomputed layer gets none unless its input asks for one, which the output of a frozen
    embedding does not, and then no adapter of the stage would train."""
    embedding = getattr(chunk, "embedding", None)
    if embedding is None or any(parameter.requires_grad for parameter in embedding.parameters()):
        return

    def ask(module: torch.nn.Module, given: object, output: Tensor) -> None:
        if torch.is_grad_enabled():
            output.requires_grad_()

    embedding.register_forward_hook(ask)


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
        copies = [host_copy(tensor) for tensor in model.weight_tensors(adapters)]
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
            model.load_hf(directory)
            if model.lora is not None:
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
        for parameter, tensor in zip(model.weight_tensors(self._adapters), self._tensors, strict=True):
            parameter.copy_(tensor, non_blocking=True)
