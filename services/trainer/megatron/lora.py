"""Low-rank adapters (LoRA, Hu et al. 2021) on Megatron's linear layers; the weights under them are frozen.

Where Megatron fuses matrices (q, k, v; gate and up) each has a pair of its own, as in PEFT: W x becomes W x + alpha / rank * B A x
with A [rank, inputs] and B [outputs, rank]. A column-parallel layer has A whole on every tensor-parallel rank and B split with
the outputs; a row-parallel one has A split with the inputs and B whole. Export is in :mod:`.adapters`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
import xxhash
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from services.trainer.megatron.hf_weights import numbered_chunks, recipe
from services.trainer.megatron.layer_modules import ReplicatedLinear
from services.trainer.megatron.runtime import device
from shared.model.architecture import Architecture
from shared.model.lora_targets import Lora

Split = Literal["outputs", "inputs", "none"]
"""The dimension of a layer that the tensor-parallel ranks divide among them."""

_DIVIDED: dict[tuple[Split, str], int] = {("outputs", "b"): 0, ("inputs", "a"): 1}
"""The split of a layer and a matrix of its adapters → the dimension of the matrix that is divided; the others are whole on every rank."""

_ACROSS: dict[tuple[Split, bool], Callable[..., Tensor]] = {
    ("outputs", False): copy_to_tensor_model_parallel_region,
    ("outputs", True): gather_from_sequence_parallel_region,
    ("inputs", False): reduce_from_tensor_model_parallel_region,
    ("inputs", True): reduce_scatter_to_sequence_parallel_region,
}
"""The split of a layer, and whether its ranks split the sequence → what carries A's product over to B on the other ranks."""


class AdapterPair(torch.nn.Module):
    """One matrix's adapter, or this rank's part of it: ``a`` [rank, inputs], ``b`` [outputs, rank]."""

    def __init__(self, rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.empty(rank, inputs, dtype=dtype, device=device()))
        self.b = torch.nn.Parameter(torch.zeros(outputs, rank, dtype=dtype, device=device()))
        for parameter in (self.a, self.b):
            parameter.adapter = True  # type: ignore[attr-defined]  # not in a Hugging Face checkpoint


class Adapter(torch.nn.Module):
    """The adapters of one of Megatron's linear layers; they compute what is added to its output.

    Args:
        linear: the layer. split: its divided dimension. matrices: those fused in the layer, by PEFT's names, with their whole
            numbers of outputs. fuse: makes this rank's weight of the layer from theirs.
    """

    def __init__(
        self,
        linear: torch.nn.Module,
        split: Split,
        matrices: Sequence[tuple[str, int]],
        fuse: Callable[[Sequence[Tensor]], Tensor],
        lora: Lora,
        config: TransformerConfig,
    ) -> None:
        super().__init__()
        self.split, self.fuse, self.lora = split, fuse, lora
        self.group = getattr(linear, "tp_group", None)
        self.scattered = config.sequence_parallel
        parts = self.group.size() if self.group is not None and split == "outputs" else 1
        self.rows = {name: rows // parts for name, rows in matrices}
        weight = linear.weight
        assert isinstance(weight, Tensor) and weight.size(0) == sum(self.rows.values())
        for name, rows in self.rows.items():
            if lora.takes(name):
                self.add_module(name, AdapterPair(lora.rank, weight.size(1), rows, config.params_dtype))
        for name, parameter in self.named_parameters():
            if (axis := _DIVIDED.get((split, name[-1]))) is not None:
                set_tensor_model_parallel_attributes(parameter, True, axis, 1)
            else:  # its gradient is a sum over the ranks' tokens
                parameter.sequence_parallel = self.scattered  # type: ignore[attr-defined]

    @property
    def pairs(self) -> dict[str, AdapterPair]:
        """Returns the pairs by PEFT's names, in the layer's order."""
        return {name: module for name, module in self.named_children() if isinstance(module, AdapterPair)}

    def forward(self, given: Tensor) -> Tensor:
        """Takes the layer's input, [..., inputs]. Returns the adapters' part of its output, [..., outputs]."""
        low = F.linear(given, torch.cat([pair.a for pair in self.pairs.values()]))
        if (across := _ACROSS.get((self.split, self.scattered))) is not None:
            low = across(low, group=self.group)
        return F.linear(low * self.lora.scale, self._fused_b())

    def _fused_b(self) -> Tensor:
        """Returns [outputs, sum of ranks], where each matrix's rows meet its own columns only. It is small beside the activations, which
        stay in one piece."""
        pairs = self.pairs
        width, at, blocks = len(pairs) * self.lora.rank, 0, []
        for name, rows in self.rows.items():
            if name in pairs:
                blocks.append(F.pad(pairs[name].b, (at, width - at - self.lora.rank)))
                at += self.lora.rank
            else:
                blocks.append(next(iter(pairs.values())).b.new_zeros(rows, width))
        return self.fuse(blocks)

    @torch.no_grad()
    def reset(self, seeds: dict[str, int]) -> None:
        """Draws A as PEFT does (Kaiming, uniform within 1 / sqrt(inputs)), the same in every layout; B zero: nothing is added."""
        for name, pair in self.pairs.items():
            rank, parts = (self.group.rank(), self.group.size()) if self.group is not None and self.split == "inputs" else (0, 1)
            inputs = pair.a.size(1) * parts
            generator = torch.Generator().manual_seed(seeds[name])
            whole = torch.empty(self.lora.rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
            pair.a.copy_(whole.chunk(parts, 1)[rank])
            pair.b.zero_()


class _Adapted(torch.nn.Module):
    """The mixin of an adapted linear layer of Megatron's, before the layer's own class in the order of resolution."""

    adapter: Adapter

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        return output + self.adapter(input_), bias


class _Sharded(_Adapted):
    """The mixin of a layer of which each rank holds a part, also in checkpoints."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        held: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        divided = [(name, p) for name, p in self.adapter.named_parameters() if getattr(p, "tensor_model_parallel", False)]
        axes = {name: parameter.partition_dim for name, parameter in divided}  # type: ignore[attr-defined]
        state, group = self.adapter.state_dict(keep_vars=True), self.adapter.group
        held |= make_sharded_tensors_for_checkpoint(
            state, f"{prefix}adapter.", axes, sharded_offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
        )
        return held


class AdaptedColumn(_Sharded, ColumnParallelLinear):
    """A layer whose outputs are split."""


class AdaptedRow(_Sharded, RowParallelLinear):
    """A layer whose inputs are split."""


class AdaptedReplicated(_Adapted, ReplicatedLinear):  # type: ignore[misc]  # the one argument that there is
    """A layer that every rank holds whole."""


_ADAPTED: dict[type, tuple[type, Split]] = {
    ColumnParallelLinear: (AdaptedColumn, "outputs"),
    RowParallelLinear: (AdaptedRow, "inputs"),
    ReplicatedLinear: (AdaptedReplicated, "none"),
}


def attach(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, lora: Lora, seed: int) -> None:
    """Gives the targeted layers adapters that add nothing yet, before gradients and optimizer are made.

    Layers are built by Megatron, whose modules compare their classes with those that they know: what is adapted becomes so afterwards.

    Args:
        seed: gives, with their names, the A matrices.
    """
    for name, linear in layers(chunks, config):
        adapted, split = _ADAPTED[type(linear)]
        made = recipe(f"{name}.weight", architecture)
        parts = linear.tp_group.size() if split == "outputs" else 1
        matrices = [(hf_name.split(".")[-2], shape[0]) for hf_name, shape in made.tensors]
        if not any(lora.takes(matrix) for matrix, _ in matrices):
            continue
        local = replace(architecture, num_key_value_heads=architecture.num_key_value_heads // parts)

        def fuse(tensors: Sequence[Tensor], made: Any = made, local: Architecture = local) -> Tensor:
            fused: Tensor = made.fuse(tensors, local, 0)
            return fused

        linear.adapter = Adapter(linear, split, matrices, fuse, lora, config)
        linear.__class__ = adapted
        seeds = {hf_name.split(".")[-2]: xxhash.xxh3_64_intdigest(f"{seed}:{hf_name}".encode()) >> 1 for hf_name in made.names}
        linear.adapter.reset(seeds)


def layers(chunks: Sequence[GPTModel], config: TransformerConfig) -> Iterator[tuple[str, Any]]:
    """Yields this rank's linear layers that can be adapted, or are, by their global names."""
    kinds = (*_ADAPTED, *(adapted for adapted, _ in _ADAPTED.values()))
    for first_layer, chunk in numbered_chunks(chunks, config):
        for name, module in chunk.named_modules():
            layer = re.fullmatch(r"decoder\.layers\.(\d+)\.((?:self_attention|mlp)\.linear_\w+)", name)
            if layer and type(module) in kinds:
                yield f"decoder.layers.{int(layer[1]) + first_layer}.{layer[2]}", module
