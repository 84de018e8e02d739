"""Quantization-aware training: layers compute with the numbers that engines get, and the gradients of those move the weights themselves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.megatron.hf_weights import parameters
from services.trainer.megatron.moe import GroupedExperts
from shared.model.architecture import Architecture
from shared.model.quantization import Quantization, QuantizedFormat
from shared.runtime.errors import ConfigError
from shared.transfer.quantizer import FakeQuantized

FIELD = "trainer.quantization_aware"


class RoundedWeights(torch.nn.Module):
    """The mixin of a layer, or of a layer's experts, whose matrices are rounded while it computes.

    Attributes:
        rounded_format: of the engines' checkpoint. rounded: the linear layers.
    """

    rounded_format: QuantizedFormat
    rounded: list[torch.nn.Module]

    def forward(self, *given: Any, **options: Any) -> Any:
        with _rounded(self.rounded, self.rounded_format):
            return super().forward(*given, **options)


@contextmanager
def _rounded(layers: Sequence[torch.nn.Module], form: QuantizedFormat) -> Iterator[None]:
    held: list[Any] = [layer._parameters["weight"] for layer in layers]
    try:
        for layer, weight in zip(layers, held, strict=True):
            layer._parameters["weight"] = FakeQuantized.apply(weight, form)
        yield
    finally:
        for layer, weight in zip(layers, held, strict=True):
            layer._parameters["weight"] = weight


def attach(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, found: Quantization | None) -> None:
    """Has the layers compute with rounded weights whose matrices engines have quantized, as ``found`` says.

    Raises ConfigError: that has no groups of 4-bit integers; a part of a matrix that ranks divide, or a layer that fuses several, has no
        whole groups.
    """
    if found is None or found.format.bits == 8:
        raise ConfigError(FIELD, True, "false, or a model.hf_checkpoint in groups of 4-bit integers (`myxo convert --to int4`)")
    chosen = set(_quantized(chunks, config, architecture, found))
    for chunk in chunks:
        experts = [module for module in chunk.modules() if isinstance(module, GroupedExperts)]
        inner = {id(part) for module in experts for part in module.modules()}
        for module in [*experts, *(one for one in chunk.modules() if id(one) not in inner)]:
            parts = module.modules() if isinstance(module, GroupedExperts) else [module]
            layers = [part for part in parts if id(part._parameters.get("weight")) in chosen]
            if layers:
                kind: Any = type(module)
                module.__class__ = type(f"Rounded{kind.__name__}", (RoundedWeights, kind), {})
                module.rounded_format, module.__dict__["rounded"] = found.format, layers


def _quantized(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, found: Quantization) -> Iterator[int]:
    for local in parameters(chunks, config, architecture):
        weight: Tensor = local.parameter
        quantized = [name for name in local.recipe.names if name in found.names]
        if quantized and len(quantized) < len(local.recipe.names):
            raise ConfigError(FIELD, True, f"false: {local.name} fuses {quantized[0]} with a matrix that is not quantized")
        if quantized and weight.shape[-1] % found.format.columns:
            wanted = f"false, or fewer ranks: {weight.shape[-1]} columns of {local.name} are not whole groups of {found.format.columns}"
            raise ConfigError(FIELD, True, wanted)
        if quantized:
            yield id(weight)
