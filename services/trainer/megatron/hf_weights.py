"""Conversion between Hugging Face's tensors and Megatron's parameters.

Megatron fuses q, k and v into one matrix, ordered by key/value group, and the two halves of a gated MLP into another; it
splits both over the tensor-parallel ranks and rounds the vocabulary up. `shared.model.tensor_table` is the one table of names, for the
local layer spec and for Transformer Engine's (which keeps norms inside the linear layers and numbers experts otherwise).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from services.trainer.parallel.runtime import device
from services.trainer.parallel.safetensors_reader import SafetensorsReader, reader_of
from shared.model.architecture import Architecture
from shared.model.tensor_table import TensorSource, is_untrained, parameter_sources


class Recipe(TensorSource):
    """The rule that makes one Megatron parameter of Hugging Face tensors."""

    def fuse(self, tensors: Sequence[Tensor], architecture: Architecture, rows: int) -> Tensor:
        """Returns the unsplit parameter; ``rows``: its size in dimension 0, with the vocabulary's padding."""
        if self.layout in ("glu", "sections"):
            return torch.cat(list(tensors))
        if self.layout in ("qkv", "gated_qkv"):
            groups = architecture.num_key_value_heads
            q, k, v = (t.reshape(groups, -1, *t.shape[1:]) for t in tensors)
            if self.layout == "gated_qkv":  # queries and gates come in turn, head by head
                q = q.unflatten(1, (-1, 2, architecture.head_dim)).transpose(1, 2).flatten(1, 3)
            return torch.cat([q, k, v], 1).flatten(0, 1)
        if self.layout == "by_key_head":
            heads, sizes = self._of_key_head(architecture)
            together = torch.cat([t.unflatten(0, (heads, -1)) for t in tensors], 1)
            return torch.cat([part.flatten(0, 1) for part in together.split(sizes, 1)])
        if self.layout == "vocabulary" and rows > tensors[0].size(0):
            below = tensors[0].new_zeros(rows - tensors[0].size(0), *tensors[0].shape[1:])
            return torch.cat([tensors[0], below])
        if self.layout == "interleaved":
            return tensors[0].unflatten(-1, (-1, 2)).permute(*reversed(range(tensors[0].dim() + 1))).flatten(0, 1)
        return tensors[0].T if self.layout == "transposed" else tensors[0]

    def parts(self, parameter: Tensor, architecture: Architecture) -> list[Tensor]:
        """Inverts :meth:`fuse`: returns views in the order of ``tensors``, elements in the tensors' order, maybe of more dimensions."""
        if self.layout == "glu":
            return list(parameter.chunk(len(self.tensors)))  # one for a family that keeps both halves in one tensor
        if self.layout == "sections":
            return list(parameter.split([shape[0] for _, shape in self.tensors]))
        if self.layout in ("qkv", "gated_qkv"):
            groups, width = architecture.num_key_value_heads, architecture.head_dim
            q, k, v = parameter.unflatten(0, (groups, -1)).tensor_split([-2 * width, -width], 1)
            return [q if self.layout == "qkv" else q.unflatten(1, (2, -1, width)).transpose(1, 2), k, v]
        if self.layout == "by_key_head":
            heads, _ = self._of_key_head(architecture)
            together = torch.cat([part.unflatten(0, (heads, -1)) for part in parameter.split(self.sections)], 1)
            return list(together.split([shape[0] // heads for _, shape in self.tensors], 1))
        if self.layout == "vocabulary":
            return [parameter[: architecture.vocab_size]]
        if self.layout == "interleaved":
            return [parameter.unflatten(0, (2, -1)).permute(*reversed(range(parameter.dim() + 1)))]
        return [parameter.T if self.layout == "transposed" else parameter]

    def shard(self, full: Tensor, dimension: int, rank: int, size: int) -> Tensor:
        """Returns what tensor-parallel rank ``rank`` of ``size`` holds of the unsplit parameter."""
        if sections := self._sections(full.size(dimension)):
            return torch.cat([part.chunk(size, dimension)[rank] for part in full.split(sections, dimension)], dimension)
        return full.chunk(size, dimension)[rank]

    def unshard(self, shards: Sequence[Tensor], dimension: int) -> Tensor:
        """Inverts :meth:`shard`, over all ranks."""
        if sections := self._sections(shards[0].size(dimension)):
            sizes = [rows * shards[0].size(dimension) // sum(sections) for rows in sections]
            parts = zip(*[shard.split(sizes, dimension) for shard in shards], strict=True)
            return torch.cat([part for of_ranks in parts for part in of_ranks], dimension)
        return torch.cat(list(shards), dimension)

    @property
    def is_view(self) -> bool:
        """Returns whether :meth:`parts` makes views."""
        return self.layout != "by_key_head"

    def _sections(self, size: int) -> list[int]:
        """Returns the rows, of ``size`` that a dimension has, that are split for themselves; for a part of it their ratio is enough."""
        return [size // 2] * 2 if self.layout == "glu" else list(self.sections)

    def _of_key_head(self, architecture: Architecture) -> tuple[int, list[int]]:
        """Returns linear attention's key heads, and what one of them has of each section."""
        assert architecture.linear is not None
        heads = architecture.linear.linear_num_key_heads
        return heads, [rows // heads for rows in self.sections]


def recipe(name: str, architecture: Architecture) -> Recipe:
    """Returns the recipe of a parameter by its global name. Raises KeyError: no row of the table covers it, which is a gap."""
    return Recipe(**vars(parameter_sources(architecture)[name]))


@dataclass(frozen=True)
class LocalParameter:
    """A parameter that this rank holds.

    Args:
        name: global: layers and experts counted over the whole model. parameter: this rank's shard. recipe: its rule.
    """

    name: str
    parameter: Tensor
    recipe: Recipe

    @property
    def split_dimension(self) -> int | None:
        """Returns the dimension split over :attr:`group`, or None for a parameter that each rank holds whole."""
        if not getattr(self.parameter, "tensor_model_parallel", False) or self.group.size() == 1:
            return None
        return int(self.parameter.partition_dim)  # type: ignore[attr-defined]

    @property
    def group(self) -> dist.ProcessGroup:
        """Returns the group of the ranks that share the parameter."""
        if ".experts." in self.name:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    def shard(self, full: Tensor) -> Tensor:
        """Returns what this rank holds of the unsplit parameter. Raises AssertionError where that has another shape than the parameter."""
        dimension = self.split_dimension
        shard = full if dimension is None else self.recipe.shard(full, dimension, self.group.rank(), self.group.size())
        assert shard.shape == self.parameter.shape, f"{self.name}: made {tuple(shard.shape)} for {tuple(self.parameter.shape)}"
        return shard


def weights_of(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of all that a checkpoint holds: the parameters, and those that no gradient moves."""
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if is_untrained(name))


def numbered_chunks(chunks: Sequence[GPTModel], config: TransformerConfig) -> Iterator[tuple[int, GPTModel]]:
    """Yields this rank's parts of the model, each with the number of its first layer."""
    for stage, chunk in enumerate(chunks):
        yield get_transformer_layer_offset(config, vp_stage=stage if len(chunks) > 1 else None), chunk


def first_expert(config: TransformerConfig) -> int:
    """Returns the number of this rank's first expert; 0 for a model without."""
    if config.num_moe_experts is None:
        return 0
    per_rank: int = config.num_moe_experts // config.expert_model_parallel_size
    return int(parallel_state.get_expert_model_parallel_rank()) * per_rank


def parameters(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture) -> Iterator[LocalParameter]:
    """Yields this rank's parameters with their global names: offsets of pipeline stages and of expert ranks applied."""
    own = first_expert(config)

    def global_expert(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) + own}{match[3]}"

    for first_layer, chunk in numbered_chunks(chunks, config):
        for name, parameter in weights_of(chunk):
            layer = re.match(r"decoder\.layers\.(\d+)\.(.+)", name)
            if layer:
                name = f"decoder.layers.{int(layer[1]) + first_layer}.{layer[2]}"
            if getattr(parameter, "value_head", False) or getattr(parameter, "adapter", False):
                continue  # a critic's own, or LoRA's; no checkpoint of the model has it
            name = re.sub(r"(\.local_experts\.)(\d+)(\.)", global_expert, name)
            name = re.sub(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)($)", global_expert, name)
            yield LocalParameter(name, parameter, recipe(name, architecture))


def parameter_of(reader: SafetensorsReader, local: LocalParameter, architecture: Architecture) -> Tensor:
    """Returns the unsplit parameter, in the checkpoint's dtype."""
    parts = local.group.size() if local.split_dimension == 0 else 1
    tensors = [reader.read(name, local.recipe.expert) for name in local.recipe.names]
    return local.recipe.fuse(tensors, architecture, local.parameter.size(0) * parts)


@torch.no_grad()
def load_hf(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, hf_dir: Path, drafts: bool = True) -> None:
    """Fills this rank's parameters from a Hugging Face checkpoint, in the model's dtype.

    The tensors of :func:`draft_prefixes` are not read.

    Args:
        drafts: whether draft layers that train are read as well.

    Raises:
        ConfigError: the directory holds other tensors than its ``config.json`` describes.
    """
    reader = reader_of(hf_dir)
    passed_over = reader.check(architecture if drafts else replace(architecture, trained_drafts=0))
    if passed_over and not architecture.trained_drafts and dist.get_rank() == 0:
        layers = architecture.draft_layers
        structlog.get_logger().warning("draft_layers_not_loaded", layers=layers, tensors=passed_over, checkpoint=str(hf_dir))
    for local in parameters(chunks, config, architecture):
        if local.name.startswith("mtp.") and not drafts:
            continue
        local.parameter.copy_(local.shard(parameter_of(reader, local, architecture)).to(device()))
