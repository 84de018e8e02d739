"""Reading of chosen tensors of a distributed checkpoint, without the others.

Megatron's own loading takes a model: all layers that are stacked under one name, or none. Here each part is read by its
offset in the whole tensor.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories, apply_factory_merges
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import load as read_shards
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from shared.runtime.errors import ConfigError


def read_tensors(path: Path, shards: dict[str, Any]) -> dict[str, Tensor]:
    """Reads tensors into new memory.

    Args:
        path: a checkpoint. shards: Megatron's ShardedTensors, or factories of them, by any name; their data is not touched.

    Returns:
        By the same names, whole tensors of the shards' shapes.

    Raises:
        ConfigError: the checkpoint does not hold one of them.
    """
    state, reader = dict(shards), CachedMetadataFileSystemReader(path)
    factories, _ = extract_matching_values(state, lambda v: isinstance(v, ShardedTensorFactory), return_lists_as_dicts=True)
    apply_factories(state)
    stored, parts = reader.read_metadata().state_dict_metadata, dict[str, list[Tensor]]()

    def part(shard: ShardedTensor) -> Tensor:
        if shard.key not in stored:
            raise ConfigError(str(path), shard.key, "a parameter of the model; the checkpoint does not hold it")
        shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)  # one of a stack
        whole = stored[shard.key].size if shard.allow_shape_mismatch else shard.global_shape  # a vocabulary is padded
        empty = torch.empty(shape, dtype=shard.dtype)
        made = replace(shard, data=empty, local_shape=shape, global_shape=tuple(whole), prepend_axis_num=0)
        parts.setdefault(shard.key, []).append(CheckpointableShardedTensor.from_sh_ten(made))
        return empty.view(shard.local_shape)

    found = dict_list_map_outplace(part, state)
    targets: dict[str, Any] = {key: LocalShardsContainer(held) for key, held in parts.items()}
    try:
        read_shards(targets, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    except CheckpointException as error:  # gathers the errors of all ranks, here of one
        for cause, _ in error.failures.values():
            raise cause from None
        raise
    return apply_factory_merges(found, factories)
