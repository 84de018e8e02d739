"""Low-rank adapters (LoRA, Hu et al. 2021) on Megatron's linear layers; the weights under them are frozen.

Where Megatron fuses matrices (q, k, v; gate and up) each has a pair of its own, as in PEFT: W x becomes W x + alpha / rank * B A x
with A [rank, inputs] and B [outputs, rank]. A column-parallel layer has A whole on every tensor-parallel rank and B split with
the outputs; a row-parallel one has A split with the inputs and B whole.

Every expert of a layer has pairs of its own. Tokens come to its ranks, and its output leaves them, by the dispatcher, so that what a rank
adds is a part of a sum like the expert's own output; only the gradient of the matrix that is whole on every rank is summed over them. The
pairs of all experts are computed as products of groups of rows, like the experts (`services.trainer.megatron.moe`).

To an export adapters are parameters of their own, under PEFT's names.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.trainer.megatron.hf_weights import LocalParameter, Recipe, first_expert, numbered_chunks, recipe
from services.trainer.megatron.moe import grouped_product
from services.trainer.megatron.spec import ReplicatedLinear
from services.trainer.parallel.export import ADAPTER_WEIGHTS
from services.trainer.parallel.runtime import device
from shared.model.architecture import Architecture
from shared.model.trainable_parameters import Lora, projection
from shared.runtime.errors import ConfigError

# the Hugging Face name of a matrix → this rank's parts of its ``a`` and ``b``, whose own names are PEFT's
Adapters = dict[str, tuple[LocalParameter, LocalParameter]]

Split = Literal["outputs", "inputs", "none"]  # the dimension of a layer that the tensor-parallel ranks divide among them
# the split of a layer and a matrix of its adapters → the dimension of the matrix that is divided; the others are whole on every rank
_DIVIDED: dict[tuple[Split, str], int] = {("outputs", "b"): 0, ("inputs", "a"): 1}

# the split of a layer, and whether its ranks split the sequence → what carries A's product over to B on the other ranks
_ACROSS: dict[tuple[Split, bool], Callable[..., Tensor]] = {
    ("outputs", False): copy_to_tensor_model_parallel_region,
    ("outputs", True): gather_from_sequence_parallel_region,
    ("inputs", False): reduce_from_tensor_model_parallel_region,
    ("inputs", True): reduce_scatter_to_sequence_parallel_region,
}


class AdapterPair(torch.nn.Module):
    """One matrix's adapter, or this rank's part of it: ``a`` [rank, inputs], ``b`` [outputs, rank], zero at first: it adds nothing."""

    def __init__(self, a: Tensor, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(a.to(device=device(), dtype=dtype).contiguous())
        self.b = torch.nn.Parameter(torch.zeros(outputs, a.size(0), dtype=dtype, device=device()))
        for parameter in (self.a, self.b):
            parameter.adapter = True  # type: ignore[attr-defined]  # not in a Hugging Face checkpoint


class Adapter(torch.nn.Module):
    """The adapters of one of Megatron's linear layers; they compute what is added to its output.

    Args:
        linear: the layer. split: its divided dimension. made: the recipe of its weight. seed: gives, with their names, the A matrices.
    """

    def __init__(
        self, linear: Any, split: Split, made: Recipe, architecture: Architecture, lora: Lora, config: TransformerConfig, seed: int
    ) -> None:
        super().__init__()
        self.of_experts = bool(getattr(linear, "is_expert", False))
        self.split, self.lora, self.scattered = split, lora, config.sequence_parallel
        self.group = getattr(linear, "tp_group", None)
        parts = self.group.size() if self.group is not None and split == "outputs" else 1
        self._made, self._local = made, replace(architecture, num_key_value_heads=architecture.num_key_value_heads // parts)
        self.rows = {projection(name): shape[0] // parts for name, shape in made.tensors}
        assert linear.weight.size(0) == sum(self.rows.values())
        for matrix in made.names:
            if lora.takes(name := projection(matrix)):
                a = self.sampled_a(linear.weight.size(1), seed, matrix)
                self.add_module(name, AdapterPair(a, self.rows[name], config.params_dtype))
        for name, parameter in self.named_parameters():
            if self.of_experts:
                parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron's word for an expert's
            if (axis := _DIVIDED.get((split, name[-1]))) is not None:
                set_tensor_model_parallel_attributes(parameter, True, axis, 1)
            elif not self.of_experts:  # its gradient is a sum over the ranks' tokens
                parameter.sequence_parallel = self.scattered  # type: ignore[attr-defined]
            elif self.group is not None and self.group.size() == 1:  # no other rank has it: the gradient's norm counts it on every rank
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def sampled_a(self, inputs: int, seed: int, matrix: str) -> Tensor:
        """Samples this rank's part of a matrix's A as PEFT does (Kaiming, uniform within 1 / sqrt(inputs)), the same in every layout."""
        rank, parts = (self.group.rank(), self.group.size()) if self.group is not None and self.split == "inputs" else (0, 1)
        bound, generator = (inputs * parts) ** -0.5, torch.Generator()
        generator.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}:{matrix}".encode()) >> 1)
        whole = torch.empty(self.lora.rank, inputs * parts).uniform_(-bound, bound, generator=generator)
        return whole.chunk(parts, 1)[rank]

    @property
    def pairs(self) -> dict[str, AdapterPair]:
        """Returns the pairs by PEFT's names, in the layer's order."""
        return {name: module for name, module in self.named_children() if isinstance(module, AdapterPair)}

    def forward(self, given: Tensor) -> Tensor:
        """Takes the layer's input, [..., inputs]. Returns the adapters' part of its output, [..., outputs]."""
        down, up = torch.cat([pair.a for pair in self.pairs.values()]), self._fused_b()
        if self.of_experts:
            if self.split == "outputs":
                down = copy_to_tensor_model_parallel_region(down, group=self.group)
            else:
                up = copy_to_tensor_model_parallel_region(up, group=self.group)
            return F.linear(F.linear(given, down) * self.lora.scale, up)
        low = F.linear(given, down)
        if (across := _ACROSS.get((self.split, self.scattered))) is not None:
            low = across(low, group=self.group)
        return F.linear(low * self.lora.scale, up)

    def of_groups(self, others: Sequence["Adapter"], rows: Tensor, ends: Tensor) -> Tensor:
        """Computes what the adapters of a layer's experts add to their groups of rows: [rows, outputs].

        Args:
            others: the adapters of all experts of this rank, this one's among them. rows: [rows, inputs], in the experts' order.
            ends: int32 [experts], where each one's rows end.
        """
        shared = self.group if self.group is not None and self.group.size() > 1 else None
        over_a, over_b = (shared, None) if self.split == "outputs" else (None, shared)
        blocks = []
        for name, height in self.rows.items():
            if name in self._modules:
                pairs: list[Any] = [other._modules[name] for other in others]
                low = grouped_product(rows, ends, [pair.a for pair in pairs], over_a)
                blocks.append(grouped_product(low * self.lora.scale, ends, [pair.b for pair in pairs], over_b))
            else:
                blocks.append(rows.new_zeros(len(rows), height))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)

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
        return self._made.fuse(blocks, self._local, 0)


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


# Layers that can be adapted, by Megatron's names within a transformer layer
_ADAPTABLE = r"(?:self_attention|mlp(?:\.shared_experts|\.experts\.local_experts\.\d+)?)\.linear_\w+"

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
        if any(lora.takes(projection(matrix)) for matrix in made.names):
            linear.adapter = Adapter(linear, split, made, architecture, lora, config, seed)
            linear.__class__ = adapted


def layers(chunks: Sequence[GPTModel], config: TransformerConfig) -> Iterator[tuple[str, Any]]:
    """Yields this rank's linear layers that can be adapted, or are, by their global names."""
    kinds = (*_ADAPTED, *(adapted for adapted, _ in _ADAPTED.values()))
    for first_layer, chunk in numbered_chunks(chunks, config):
        for name, module in chunk.named_modules():
            layer = re.fullmatch(rf"decoder\.layers\.(\d+)\.({_ADAPTABLE})", name)
            if layer and type(module) in kinds:
                within = re.sub(r"(?<=local_experts\.)\d+", lambda own: str(int(own[0]) + first_expert(config)), layer[2])
                yield f"decoder.layers.{int(layer[1]) + first_layer}.{within}", module


def adapters_of(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture) -> Adapters:
    """Returns the adapters of this rank's pipeline stage, in the order of the layers."""
    found: Adapters = {}
    for layer, linear in layers(chunks, config):
        pairs = linear.adapter.pairs if hasattr(linear, "adapter") else {}
        for matrix in recipe(f"{layer}.weight", architecture).names:
            if (pair := pairs.get(projection(matrix))) is not None:
                found[matrix] = _local(matrix, "A", pair.a), _local(matrix, "B", pair.b)
    return found


def _local(matrix: str, part: str, parameter: torch.nn.Parameter) -> LocalParameter:
    name, shape = f"base_model.model.{matrix.removesuffix('.weight')}.lora_{part}.weight", list(parameter.shape)
    alone = LocalParameter(name, parameter, Recipe(()))
    if (dimension := alone.split_dimension) is not None:
        shape[dimension] *= alone.group.size()
    return LocalParameter(name, parameter, Recipe(((name, tuple(shape)),)))


@torch.no_grad()
def silence_adapters(adapters: Adapters) -> None:
    """Zeroes every adapter's ``b``, so that the model computes what its base would."""
    for _, b in adapters.values():
        b.parameter.zero_()


@torch.no_grad()
def renew_adapters(
    chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, seed: int, rank: int, parts: Collection[str]
) -> None:
    """Makes all adapters new ones that add nothing, by a seed.

    Rows of A beyond ``rank``, and pairs of layers that are in none of ``parts`` (attn, mlp), are zero on both sides: no gradient reaches
    them, and they stay so.
    """
    for layer, linear in layers(chunks, config):
        pairs, kind = linear.adapter.pairs if hasattr(linear, "adapter") else {}, "attn" if "self_attention" in layer else "mlp"
        for matrix in recipe(f"{layer}.weight", architecture).names if pairs else ():
            if (pair := pairs.get(projection(matrix))) is not None:
                a = linear.adapter.sampled_a(linear.weight.size(1), seed, matrix)
                a[rank if kind in parts else 0 :] = 0
                pair.a.copy_(a)
                pair.b.zero_()


@torch.no_grad()
def load_adapters(adapters: Adapters, directory: Path) -> None:
    """Takes the adapters from a directory in PEFT's format, whatever layout wrote it.

    Raises:
        ConfigError: they cannot be read, or are not those of this model.
    """
    path = directory / ADAPTER_WEIGHTS
    try:
        with safe_open(path, framework="pt") as held:
            for local in [part for pair in adapters.values() for part in pair]:
                (_, shape), whole = local.recipe.tensors[0], held.get_tensor(local.name)
                if tuple(whole.shape) != shape:
                    raise ConfigError(f"{path}:{local.name}", tuple(whole.shape), f"shape {shape}")
                local.parameter.copy_(local.shard(whole))
    except (OSError, SafetensorError) as error:
        raise ConfigError("trainer.lora_rank", str(path), f"a readable file with the adapters of this model ({error})") from error
