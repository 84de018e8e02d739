"""This rank's part of a checkpoint: planned with the other ranks, copied to host memory if so wanted, and written later.

Every rank writes what it holds, and nothing is gathered: only the names and places of parts are exchanged. What several ranks hold is
written once, by one of them in each directory (:mod:`.writer_election`).
"""

import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, TorchDistSaveShardedStrategy, mcore_to_pyt_state_dict
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.checkpoint_places import Places
from services.trainer.megatron.optimizer_shards import in_pieces
from services.trainer.megatron.runtime import gather_json, host_copy
from services.trainer.megatron.shard_boxes import overlap
from services.trainer.megatron.writer_election import Elected, HeldPart, elect


class StagedShards(TorchDistSaveShardedStrategy):
    """This rank's shards, as torch_dist writes them, one file a rank.

    Megatron's own strategies start a process to write and another that re-imports ``__main__`` for the queue between them,
    which a service with threads and connections cannot afford.

    Args:
        copied: whether to copy live tensors, so that training may change them before they are written. places: the ranks' directories.
    """

    def __init__(self, copied: bool, places: Places) -> None:
        super().__init__("torch_dist", 1)
        self.copied, self.places = copied, places
        self._metadata: Any = None
        self._copies: dict[int, list[MetadataIndex]] = {}
        self._sizes: dict[MetadataIndex, torch.Size] = {}

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Plans and copies the shards. The name is Megatron's. This is a collective of all ranks."""
        held = {_name(base): base for each in nested_values(sharded_state_dict) for base in _parts(each)}
        elected = _elected(held, self.places)
        own = elected[dist.get_rank()].main | elected[dist.get_rank()].copies
        mine = [base for name, base in held.items() if name in own]
        self._plan, self._writer = self._planned(mine, elected, checkpoint_dir)
        tensors = {MetadataIndex(base.key, torch.Size(base.global_offset)): base.data for base in mine if isinstance(base, ShardedTensor)}
        values = {item.index: tensors.get(item.index, self._objects.get(item.index.fqn)) for item in self._plan.items}
        self._data = {index: _on_host(value) for index, value in values.items()} if self.copied else values
        if self.copied and DEVICE_TYPE == "cuda":
            torch.cuda.synchronize()

    def _planned(self, mine: list[ShardedBase], elected: list[Elected], directory: str | Path) -> tuple[SavePlan, FileSystemWriter]:
        """Returns this rank's plan and its writer. Rank 0 also gets the metadata of the whole, which DCP checks to be without gap."""
        by_key: defaultdict[str, list[ShardedBase]] = defaultdict(list)
        for base in mine:
            by_key[base.unique_key if isinstance(base, ShardedObject) else base.key].append(base)
        state = mcore_to_pyt_state_dict(dict(by_key), False)
        self._objects = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1, sync_files=True)
        first = dist.get_rank() == 0

        def own() -> SavePlan:
            planner.set_up_planner(state, writer.storage_meta(), first)
            writer.set_up_storage_writer(first)
            return writer.prepare_local_plan(planner.create_local_plan())

        def everyones(plans: list[SavePlan]) -> list[SavePlan]:
            seen, once = set[MetadataIndex](), list[SavePlan]()
            for rank, plan in enumerate(plans):
                copies = [item for item in plan.items if _item_name(item) in elected[rank].copies]
                self._copies[rank] = [item.index for item in copies]
                self._sizes |= {item.index: item.tensor_data.chunk.sizes for item in copies if item.tensor_data is not None}
                main = [item for item in plan.items if item.index not in seen and _item_name(item) in elected[rank].main]
                seen.update(item.index for item in main)
                once.append(replace(plan, items=main))
            _, self._metadata = planner.create_global_plan(once)
            return writer.prepare_global_plan(plans)

        return planner.finish_plan(_DistWrapper(None, True, 0).reduce_scatter("plan", own, everyones)), writer

    def write(self) -> list[list[Any]]:
        """Writes this rank's file and returns what it now holds, as JSON data."""
        written = self._writer.write_data(self._plan, cast(SavePlanner, self)).value()
        self._data = {}
        return [_encoded(result) for result in written]

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns an item's data to the file writer, which calls this when it writes it, as a method of its planner."""
        return self._data[write_item.index]

    def index(self, everyone: list[list[list[Any]]], directory: int) -> bytes:
        """Returns ``.metadata`` for a directory, on rank 0, given what :meth:`write` returned on each rank.

        It describes the whole. What lies in several directories, it takes from this one.
        """
        directories = self.places.directories
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for ranks in [*directories[:directory], *directories[directory + 1 :], directories[directory]]:
            for rank in ranks:
                passed = set(self._copies.get(rank, []))
                storage |= {key: info for key, info in map(_decoded, everyone[rank]) if key not in passed}
        chunks = dict(self._metadata.state_dict_metadata)
        for rank in directories[directory]:
            copies, decoded = set(self._copies.get(rank, [])), dict(map(_decoded, everyone[rank]))
            for key in copies & self._sizes.keys():
                assert key.offset is not None  # a tensor's
                chunk = ChunkStorageMetadata(offsets=key.offset, sizes=self._sizes[key])
                others = [other for other in chunks[key.fqn].chunks if not overlap(_box(chunk), _box(other))]
                chunks[key.fqn] = replace(chunks[key.fqn], chunks=[*others, chunk])
                storage[key] = decoded[key]
        metadata = replace(self._metadata, state_dict_metadata=chunks, storage_data=storage, storage_meta=self._writer.storage_meta())
        if hasattr(metadata, "version"):  # since torch 2.10
            metadata.version = filesystem.CURRENT_DCP_VERSION
        return pickle.dumps(metadata)


def _elected(held: dict[str, ShardedBase], places: Places) -> list[Elected]:
    """Returns what each rank writes, given what this one holds. A collective of all ranks."""
    everyone = gather_json({name: [_nbytes(base), _is_main(base)] for name, base in held.items()})
    return elect([{name: HeldPart(*part) for name, part in each.items()} for each in everyone], places.directories)


def _parts(base: ShardedBase) -> Iterator[ShardedBase]:
    if isinstance(base, ShardedTensor):
        yield from in_pieces(base)
    else:
        yield base


def _name(base: ShardedBase) -> str:
    if isinstance(base, ShardedTensor):
        return _hashed(base.key, base.global_offset, base.local_shape)
    assert isinstance(base, ShardedObject)
    return _hashed(base.unique_key)


def _item_name(item: WriteItem) -> str:
    if item.tensor_data is None:
        return _hashed(item.index.fqn)
    return _hashed(item.index.fqn, item.index.offset, item.tensor_data.chunk.sizes)


def _hashed(key: str, *numbers: Any) -> str:
    return blake2b(repr((key, *map(tuple, numbers))).encode(), digest_size=9).hexdigest()


def _nbytes(base: ShardedBase) -> int:
    return base.data.nbytes if isinstance(base.data, Tensor) else 0


def _is_main(base: ShardedBase) -> bool:
    """Returns whether a part is one of those that make up the whole. The last of a replica's indices is its data-parallel rank, which says
    nothing: replicas are cut alike, and slices of an optimizer are each rank's own."""
    replica = base.replica_id
    return replica == 0 if isinstance(replica, int) else all(index == 0 for index in replica[:-1])


def _box(chunk: ChunkStorageMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _on_host(value: Any) -> Any:
    return host_copy(value) if isinstance(value, Tensor) else value  # else serialized already


def _encoded(result: WriteResult) -> list[Any]:
    index, stored = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, stored.relative_path, stored.offset, stored.length]


def _decoded(result: list[Any]) -> tuple[MetadataIndex, _StorageInfo]:
    name, offset, index, path, start, length = result
    return MetadataIndex(name, None if offset is None else torch.Size(offset), index), _StorageInfo(path, start, length)
