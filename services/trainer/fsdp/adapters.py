"""Low-rank adapters (LoRA, Hu et al. 2021) on linear layers of transformers' models; the weights under them are frozen.

W x becomes W x + alpha / rank * B A x, with A [rank, inputs] and B [outputs, rank]. Names, first values and the format are those of the
Megatron backend's (`services.trainer.megatron.lora`), so that runs of either begin alike and give the same files.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from shared.config.trainer_section import ALL_LINEAR
from shared.model.trainable_parameters import Lora, projection
from shared.runtime.errors import ConfigError, nearest

FIELD = "trainer.target_modules"
MARK = ".adapter."  # in the names of adapters' parameters
_ROUTERS = {"gate", "router", "shared_expert_gate"}  # small layers that choose; Megatron adapts none of them


class LinearAdapter(torch.nn.Module):
    """One layer's adapter: ``a`` [rank, inputs], ``b`` [outputs, rank], zero at first: it adds nothing."""

    def __init__(self, linear: torch.nn.Linear, lora: Lora, seed: int) -> None:
        super().__init__()
        bound, generator = linear.in_features**-0.5, torch.Generator().manual_seed(seed)
        self.a = torch.nn.Parameter(torch.empty(lora.rank, linear.in_features).uniform_(-bound, bound, generator=generator))
        self.b = torch.nn.Parameter(torch.zeros(linear.out_features, lora.rank))
        self.scale = lora.scale

    def forward(self, given: Tensor) -> Tensor:
        return F.linear(F.linear(given, self.a) * self.scale, self.b)


class AdaptedLinear(torch.nn.Linear):
    """A linear layer that has an adapter."""

    adapter: LinearAdapter

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.adapter(input)


def attach(model: Any, lora: Lora, seed: int) -> None:
    """Gives the targeted layers adapters that add nothing yet, and freezes all other parameters.

    Raises ConfigError: a target is no linear layer's name, or names experts, which transformers keeps in tensors of all of them.
    """
    linear = dict(_layers(model))
    known = list(dict.fromkeys(map(projection, linear)))
    for name in lora.targets:
        if name != ALL_LINEAR and name not in known:
            raise ConfigError(FIELD, name, f"a linear layer of {type(model).__name__}: {nearest(name, known)}")
    for name, parameter in model.named_parameters():  # of a convolution's three sizes none counts experts
        if parameter.dim() == 3 and not isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Conv1d):
            of_experts = {projection(each) for each in revert_weight_conversion(model, {name: torch.empty(parameter.shape, device="meta")})}
            if any(map(lora.takes, of_experts)):
                wanted = (
                    f"some of {', '.join(each for each in known if each not in of_experts)}; the torch backend adapts no experts ({name})"
                )
                raise ConfigError(FIELD, list(lora.targets), wanted)
    model.requires_grad_(False)
    for matrix, module in linear.items():
        if lora.takes(projection(matrix)):
            module.adapter = LinearAdapter(module, lora, xxhash.xxh3_64_intdigest(f"{seed}:{matrix}".encode()) >> 1)
            module.__class__ = AdaptedLinear


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the linear layers that can be adapted by the checkpoint's names of their weights; of a model that sees those of language."""
    head, text = model.get_output_embeddings(), set(getattr(model.base_model, "language_model", model).modules())
    for name, module in model.named_modules():
        adaptable = module in text and type(module) in (torch.nn.Linear, AdaptedLinear)
        if adaptable and module is not head and _ROUTERS.isdisjoint(name.split(".")):
            weight = torch.empty(module.weight.shape, device="meta")
            (matrix, *others) = revert_weight_conversion(model, {f"{name}.weight": weight})
            if not others:
                yield matrix, module


def adapters_of(model: Any) -> dict[str, LinearAdapter]:
    """Returns the adapters by the checkpoint's names of the matrices that they are added to."""
    return {matrix: module.adapter for matrix, module in _layers(model) if isinstance(module, AdaptedLinear)}


def peft_name(matrix: str, part: str) -> str:
    """Returns PEFT's name of one of an adapter's matrices. ``part``: ``a`` or ``b``."""
    return f"base_model.model.{matrix.removesuffix('.weight')}.lora_{part.upper()}.weight"
