"""This rank's part of a checkpoint: planned with the other ranks, copied to host memory if wanted, and written later.

Every rank writes what it holds, and nothing is gathered: only the names and places of parts are exchanged. What several ranks hold is
written once, by one of them in each directory (`elect`).

A checkpoint knows nothing of the layout that wrote it: parts are named by their places in the whole.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_read_item_for_byteio, create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from services.trainer.parallel import DEVICE_TYPE
from services.trainer.parallel.joint_write import Elected, HeldPart, Places, elect
from services.trainer.parallel.runtime import gather_json, host_copy
from shared.runtime.errors import ConfigError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # the offsets and the sizes of a box, one of each a dimension


def boxes_of_interval(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Returns boxes that hold exactly the elements ``start`` to ``stop`` of a tensor in row-major order.

    They are disjoint, in that order, and each one's elements follow one another. There are at most two for each dimension, less one.

    Args:
        start, stop: elements, within those of ``shape``. shape: of the tensor.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    rest = tuple(shape[1:])
    inner = prod(rest)
    first, last = -(-start // inner), stop // inner  # the whole rows in between
    if first > last:  # the interval lies within one row
        return [_under(first - 1, box) for box in boxes_of_interval(start % inner, (stop - 1) % inner + 1, rest)]
    found: list[Box] = []
    if start % inner:
        found += [_under(first - 1, box) for box in boxes_of_interval(start % inner, inner, rest)]
    if first < last:
        found.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    if stop % inner:
        found += [_under(last, box) for box in boxes_of_interval(0, stop % inner, rest)]
    return found


def _under(row: int, box: Box) -> Box:
    return (row, *box[0]), (1, *box[1])


def elements_before(position: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns how many elements of a view lie before ``position``, counted in elements from the view's first.

    Args:
        strides: of the view, each at least as long as all that the dimensions behind it span.
    """
    count, left = 0, position
    for dimension, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if left <= 0:
            break
        innermost = dimension == len(shape) - 1
        whole = min(-(-left // stride) if innermost else left // stride, size)
        count += whole * prod(shape[dimension + 1 :])
        if whole == size:
            break
        left -= whole * stride
    return count


def is_ordered(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether a view's elements lie in memory in row-major order, with or without gaps."""
    spans = [(size - 1) * stride + 1 for size, stride in zip(shape, strides, strict=True)]
    inner = [1 + sum(span - 1 for span in spans[index + 1 :]) for index in range(len(spans))]
    return all(stride >= behind for size, stride, behind in zip(shape, strides, inner, strict=True) if size > 1)


def pieces(shape: Sequence[int], itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Yields boxes of at most ``most_bytes`` that make up a tensor, cut along its first dimension that has more than one element.

    They depend on nothing but the shape: replicas are cut alike. A single row may be larger.
    """
    cut = next((index for index, size in enumerate(shape) if size > 1), None)
    whole = tuple(0 for _ in shape), tuple(shape)
    if cut is None or prod(shape) * itemsize <= most_bytes:
        yield whole
        return
    rows = max(1, most_bytes // (prod(shape[cut + 1 :]) * itemsize))
    for start in range(0, shape[cut], rows):
        size = min(rows, shape[cut] - start)
        yield (
            tuple(start if index == cut else 0 for index in range(len(shape))),
            tuple(size if index == cut else length for index, length in enumerate(shape)),
        )


def overlap(first: Box, second: Box) -> bool:
    """Returns whether two boxes of a tensor have an element in common."""
    return all(a < b + n and b < a + m for a, m, b, n in zip(*first, *second, strict=True))


PIECE_BYTES = 64 << 20  # the most bytes of a part that is written at once, and thus beside a rank's own shard in host memory


@dataclass(frozen=True)
class CheckpointPart:
    """A part of a checkpoint that this rank holds.

    Args:
        key: the whole's name. data: the part's, or bytes that are no tensor. offset: of the part in the whole. shape: the whole's.
        main: whether it is one of those that make up the whole; others are replicas, which are cut alike.
    """

    key: str
    data: Tensor | io.BytesIO
    offset: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    main: bool = True

    @classmethod
    def of_rank(cls, key: str, value: Any) -> "CheckpointPart":
        """Makes a part of plain data that each rank has its own of."""
        written = io.BytesIO()
        torch.save([value], written)
        return cls(f"{key}/shard_{dist.get_rank()}_{dist.get_world_size()}", written)

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, torch.Size(self.offset)) if isinstance(self.data, Tensor) else MetadataIndex(self.key)

    @property
    def name(self) -> str:
        return _hashed(self.key, self.offset, self.data.shape) if isinstance(self.data, Tensor) else _hashed(self.key)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        assert isinstance(self.data, Tensor)
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.data.size())

    def item(self) -> WriteItem:
        if not isinstance(self.data, Tensor):
            return WriteItem(self.index, WriteItemType.BYTE_IO)
        properties = TensorProperties.create_from_tensor(self.data)
        return WriteItem(self.index, WriteItemType.SHARD, tensor_data=TensorWriteData(self.chunk, properties, torch.Size(self.shape)))

    def pieces(self) -> Iterator["CheckpointPart"]:
        """Yields it in parts of at most `PIECE_BYTES`: views of its data."""
        if not isinstance(self.data, Tensor):
            yield self
            return
        for offsets, sizes in pieces(self.data.shape, self.data.dtype.itemsize, PIECE_BYTES):
            data = self.data[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
            yield replace(self, data=data, offset=tuple(a + b for a, b in zip(self.offset, offsets, strict=True)))


def read_parts(parts: Iterable[CheckpointPart], directory: Path) -> dict[str, Any]:
    """Reads tensors into the data of these parts, whatever parts wrote them, and returns the values of those that are none, by their keys.

    Raises ConfigError: the checkpoint lacks a part.
    """
    reader, wanted = FileSystemReader(directory), list(parts)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, False)
    planner, items = _Reads({part.index: part.data for part in wanted}), []
    for part in wanted:
        stored = metadata.state_dict_metadata.get(part.key)
        if isinstance(part.data, Tensor):
            found = list[ReadItem]()
            if isinstance(stored, TensorStorageMetadata) and tuple(stored.size) == part.shape:
                found = create_read_items_for_chunk_list(part.key, stored, [part.chunk])
            if sum(prod(item.lengths) for item in found) != part.data.numel():
                raise ConfigError(str(directory), part.key, f"a tensor of shape {part.shape} that the checkpoint has as a whole")
            items += [replace(item, dest_index=part.index) for item in found]
        elif stored is None:
            raise ConfigError(str(directory), part.key, "an entry of the checkpoint")
        else:
            items.append(_create_read_item_for_byteio(part.index, 0, part.index, 0, 0))
    reader.read_data(reader.prepare_local_plan(LoadPlan(items)), cast(Any, planner)).wait()
    return planner.values


class _Reads:
    """What the file reader asks of a planner. ``targets``: the tensors that are filled; ``values``: what else was read."""

    def __init__(self, targets: Mapping[MetadataIndex, Any]) -> None:
        self._targets, self.values = targets, dict[str, Any]()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # what NumPy's random state consists of; a context would take from Megatron at its end what it allows, too
        plain: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.zeros(0).__reduce__()[0]]
        torch.serialization.add_safe_globals(plain)
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)[0]

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        offset, lengths = read_item.dest_offsets, read_item.lengths
        target: Tensor = self._targets[read_item.dest_index]
        return target[tuple(slice(start, start + length) for start, length in zip(offset, lengths, strict=True))]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Does nothing: tensors are filled in place."""


class StagedShards:
    """This rank's shards, as torch_dist writes them, one file a rank.

    Args:
        copied: whether to copy live tensors, so that training may change them before they are written. places: the ranks' directories.
    """

    def __init__(self, copied: bool, places: Places) -> None:
        self.copied, self.places = copied, places
        self._metadata: Any = None
        self._copies: dict[int, list[MetadataIndex]] = {}
        self._sizes: dict[MetadataIndex, torch.Size] = {}

    def stage(self, parts: Iterable[CheckpointPart], directory: Path) -> None:
        """Plans and copies the parts. This is a collective of all ranks."""
        held = {piece.name: piece for part in parts for piece in part.pieces()}
        elected = _elected(held, self.places)
        own = elected[dist.get_rank()].main | elected[dist.get_rank()].copies
        mine = {part.index: part for name, part in held.items() if name in own}
        self._plan, self._writer = self._planned(list(mine.values()), elected, directory)
        values = {item.index: mine[item.index].data for item in self._plan.items}
        copies = {index: host_copy(value) for index, value in values.items() if self.copied and isinstance(value, Tensor)}
        self._data: dict[MetadataIndex, Any] = {**values, **copies}  # what is no tensor is serialized already
        if self.copied and DEVICE_TYPE == "cuda":
            torch.cuda.synchronize()

    def _planned(self, mine: list[CheckpointPart], elected: list[Elected], directory: Path) -> tuple[SavePlan, FileSystemWriter]:
        """Returns this rank's plan and its writer. Rank 0 also gets the metadata of the whole, which DCP checks to be without gap."""
        writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1, sync_files=True)

        def own() -> SavePlan:
            writer.set_up_storage_writer(dist.get_rank() == 0)
            return writer.prepare_local_plan(SavePlan([part.item() for part in mine]))

        def everyones(plans: list[SavePlan]) -> list[SavePlan]:
            seen, once = set[MetadataIndex](), list[SavePlan]()
            for rank, plan in enumerate(plans):
                copies = [item for item in plan.items if _item_name(item) in elected[rank].copies]
                self._copies[rank] = [item.index for item in copies]
                self._sizes |= {item.index: item.tensor_data.chunk.sizes for item in copies if item.tensor_data is not None}
                main = [item for item in plan.items if item.index not in seen and _item_name(item) in elected[rank].main]
                seen.update(item.index for item in main)
                once.append(replace(plan, items=main))
            _, self._metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(once)
            return writer.prepare_global_plan(plans)

        return _DistWrapper(None, True, 0).reduce_scatter("plan", own, everyones), writer

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


def _elected(held: Mapping[str, CheckpointPart], places: Places) -> list[Elected]:
    sizes = {name: part.data.nbytes if isinstance(part.data, Tensor) else 0 for name, part in held.items()}
    everyone = gather_json({name: [sizes[name], part.main] for name, part in held.items()})
    return elect([{name: HeldPart(*part) for name, part in each.items()} for each in everyone], places.directories)


def _item_name(item: WriteItem) -> str:
    if item.tensor_data is None:
        return _hashed(item.index.fqn)
    return _hashed(item.index.fqn, item.index.offset, item.tensor_data.chunk.sizes)


def _hashed(key: str, *numbers: Any) -> str:
    return blake2b(repr((key, *map(tuple, numbers))).encode(), digest_size=9).hexdigest()


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _encoded(result: WriteResult) -> list[Any]:
    index, stored = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, stored.relative_path, stored.offset, stored.length]


def _decoded(result: list[Any]) -> tuple[MetadataIndex, _StorageInfo]:
    name, offset, index, path, start, length = result
    return MetadataIndex(name, None if offset is None else torch.Size(offset), index), _StorageInfo(path, start, length)
