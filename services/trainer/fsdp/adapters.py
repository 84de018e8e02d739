"""Low-rank adapters (LoRA, Hu et al. 2021) on linear layers and experts of transformers' models; the weights under them are frozen.

W x becomes W x + alpha / rank * B A x, with A [rank, inputs] and B [outputs, rank]. Names, first values and the format are those of the
Megatron backend's (`services.trainer.megatron.lora`), so that runs of either begin alike and give the same files.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import _grouped_linear

from shared.model.trainable_parameters import Lora, projection
from shared.runtime.errors import ConfigError

FIELD = "trainer.target_modules"
MARK = ".adapter."  # in the names of adapters' parameters
_ROUTERS = {"gate", "router", "shared_expert_gate"}  # small layers that choose; Megatron adapts none of them


class LinearAdapter(torch.nn.Module):
    """An adapter: ``a`` [rank, inputs], ``b`` [outputs, rank], zero at first: it adds nothing. Of a layer's experts [experts, ...] each.

    Args:
        matrices: the checkpoint's names of those that it is added to: one, or each expert's.
    """

    def __init__(self, matrices: list[str], shape: torch.Size, lora: Lora, seed: int, of_experts: bool = False) -> None:
        super().__init__()
        (outputs, inputs), made = shape, []
        for matrix in matrices:
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}:{matrix}".encode()) >> 1)
            made.append(torch.empty(lora.rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator))
        self.a = torch.nn.Parameter(torch.stack(made) if of_experts else made[0])
        self.b = torch.nn.Parameter(torch.zeros(*self.a.shape[:-2], outputs, lora.rank))
        self.matrices, self.scale = matrices, lora.scale

    def forward(self, given: Tensor) -> Tensor:
        return F.linear(F.linear(given, self.a) * self.scale, self.b)

    def of_groups(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Computes what is added to the experts' rows, in their order. ``ends``: int32 [experts], where each one's end."""
        missing = -self.a.size(1) % 8  # the kernel takes whole groups of 16 bytes
        low: Tensor = _grouped_linear(rows, F.pad(self.a, (0, 0, 0, missing)), ends)
        added: Tensor = _grouped_linear(low * self.scale, F.pad(self.b, (0, missing)), ends)
        return added

    def of(self, matrix: str, whole: Tensor) -> Tensor:
        """Returns a matrix's part of ``a`` or ``b``."""
        return whole[self.matrices.index(matrix)] if whole.dim() == 3 else whole


class AdaptedLinear(torch.nn.Linear):
    """A linear layer that has an adapter."""

    adapter: LinearAdapter

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.adapter(input)


def attach(model: Any, lora: Lora, seed: int) -> None:
    """Gives the targeted layers adapters that add nothing yet, and freezes all other parameters.

    Raises ConfigError: `Lora.check_targets`, or a target names experts that a checkpoint has in tensors of all of them.
    """
    linear, stacks = dict(_layers(model)), list(_stacks(model))
    of_experts = [projection(matrix) for _, _, matrices in stacks for matrix in matrices]
    known = list(dict.fromkeys([*map(projection, linear), *of_experts]))
    lora.check_targets(known, f"a linear layer of {type(model).__name__}")
    model.requires_grad_(False)
    for matrix, module in linear.items():
        if lora.takes(projection(matrix)):
            module.adapter = LinearAdapter([matrix], module.weight.shape, lora, seed)
            module.__class__ = AdaptedLinear
    for module, name, matrices in stacks:
        if any(map(lora.takes, map(projection, matrices))) and not _attach_experts(module, name.rpartition(".")[2], matrices, lora, seed):
            left = ", ".join(each for each in known if each not in of_experts)
            raise ConfigError(FIELD, list(lora.targets), f"some of {left}; experts of {type(model).__name__} are in one tensor ({name})")


def _attach_experts(module: Any, name: str, matrices: Mapping[str, Tensor], lora: Lora, seed: int) -> bool:
    """Adapts the experts' matrices of one parameter. Returns False where they are not each a block of it."""
    kinds, (count, rows, inputs) = list(dict.fromkeys(map(projection, matrices))), getattr(module, name).shape
    one = torch.Size((rows // len(kinds), inputs))
    blocks = all(view.shape == one and view.storage_offset() == index * one.numel() for index, view in enumerate(matrices.values()))
    if getattr(module, "is_transposed", True) or not blocks or len(matrices) != len(kinds) * count:
        return False
    module.adapter = getattr(module, "adapter", torch.nn.ModuleDict())
    for kind in filter(lora.takes, kinds):
        module.adapter[kind] = LinearAdapter([each for each in matrices if projection(each) == kind], one, lora, seed, True)
    module.adapted = {**getattr(module, "adapted", {}), name: dict.fromkeys(kinds, one[0])}
    return True


def _stacks(model: Any) -> Iterator[tuple[Any, str, dict[str, Tensor]]]:
    """Yields modules that have matrices of all experts in one parameter, its name, and the checkpoint's tensors as views of it."""
    for name, parameter in model.named_parameters():  # of a convolution's three sizes none counts experts
        if parameter.dim() == 3 and not isinstance(module := model.get_submodule(name.rpartition(".")[0]), torch.nn.Conv1d):
            made = revert_weight_conversion(model, {name: torch.empty(parameter.shape, device="meta")})
            yield module, name, dict(sorted(made.items(), key=lambda item: item[1].storage_offset()))


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


def adapters_of(model: Any) -> list[LinearAdapter]:
    """Returns all adapters."""
    return [module for module in model.modules() if isinstance(module, LinearAdapter)]


def peft_name(matrix: str, part: str) -> str:
    """Returns PEFT's name of one of an adapter's matrices. ``part``: ``a`` or ``b``."""
    return f"base_model.model.{matrix.removesuffix('.weight')}.lora_{part.upper()}.weight"
