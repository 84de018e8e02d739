"""Reading of chosen tensors of a distributed checkpoint, without the others.

Megatron's own loading takes a model: all layers that are stacked under one name, or none. Here each part is read by its
offset in the whole tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories, apply_factory_merges
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint import load as read_shards
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

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
    state = dict(shards)
    factories, _ = extract_matching_values(state, lambda v: isinstance(v, ShardedTensorFactory), return_lists_as_dicts=True)
    apply_factories(state)
    parts: dict[str, _Parts] = {}
    for shard in nested_values(state):
        parts.setdefault(shard.key, _Parts()).add(shard)
    with own_errors():
        read_shards(parts, storage_reader=FileSystemReader(path), planner=_Planner(path))
    return apply_factory_merges(_filled(state), factories)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises the cause itself where PyTorch, in a process alone, would wrap it in an error that gathers those of all ranks."""
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            raise cause from None
        raise


def _filled(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _filled(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_filled(value) for value in state]
    return state.data if isinstance(state, ShardedTensor) else state


class _Parts:
    """Parts of one stored tensor, with the interface that PyTorch asks of an object that it reads into."""

    def __init__(self) -> None:
        self._by_offset: dict[torch.Size, Tensor] = {}

    def add(self, shard: ShardedTensor) -> None:
        shard.data = torch.empty(shard.local_shape, dtype=shard.dtype)
        stacked = (1,) * shard.prepend_axis_num
        self._by_offset[torch.Size(shard.global_offset)] = shard.data.view(*stacked, *shard.local_shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, part.size()) for offset, part in self._by_offset.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._by_offset[index.offset]

    def __create_write_items__(self, name: str, object: Any) -> list[Any]:
        raise NotImplementedError("parts are only read")


class _Planner(DefaultLoadPlanner):
    """PyTorch's load planner, for :class:`_Parts`."""

    def __init__(self, path: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        missing = sorted(state_dict.keys() - metadata.state_dict_metadata.keys())
        if missing:
            raise ConfigError(str(self._path), missing[0], "a parameter of the model; the checkpoint does not hold it")
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        parts: _Parts = self.state_dict[index.fqn]
        return parts.__get_tensor_shard__(index)
