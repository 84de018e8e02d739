"""This rank's part of a checkpoint: planned with the other ranks, copied to host memory if wanted, and written later.

Every rank writes what it holds, and nothing is gathered: only the names and places of parts are exchanged. What several ranks hold is
written once, by one of them in each directory (`elect`).

The distributed optimizer's state is described in the dimensions of the parameters. A rank updates a slice of the flat buffer, which
begins and ends anywhere in a parameter. Each slice is named by the boxes that it makes up in its parameter, and they are written and read
where they lie. A checkpoint knows nothing of the layout that wrote it.
"""

import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, TorchDistSaveShardedStrategy, mcore_to_pyt_state_dict
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.joint_write import Elected, HeldPart, Places, elect
from services.trainer.megatron.runtime import gather_json, host_copy

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


_PREFIX = "optimizer.state"
PIECE_BYTES = 64 << 20  # the most bytes of a part that is written at once, and thus beside a rank's own shard in host memory


class LiveState:
    """The state of one distributed optimizer on this rank: float32 weights and moments, slice by slice.

    Args:
        optimizer: its moments exist. sharded_model: Megatron's sharded state of the model that it updates.
    """

    def __init__(self, optimizer: DistributedOptimizer, sharded_model: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        found, _ = extract_sharded_tensors_and_factories(dict(sharded_model))
        self._shard_of = {id(base.data): base for base in nested_values(found)}
        self._slices = [(parameter, spans["param"], self._tensors(parameter)) for parameter, spans in _spans(optimizer)]

    def sharded(self) -> dict[str, Any]:
        """Returns the state as Megatron's sharded tensors. They are views of it, or where it is kept in another precision of copies."""
        shards: dict[str, Any] = {}
        for index, (parameter, span, tensors) in enumerate(self._slices):
            base = self._shard_of.get(id(parameter))
            assert base is not None  # the model's sharded state keeps its parameters
            for state, tensor in tensors.items():
                boxes = list(_boxes(base, f"{_PREFIX}.{state}.", tuple(parameter.shape), span.start, tensor))
                shards |= {f"{index}.{state}.{number}": box for number, box in enumerate(boxes)}
        return shards

    @torch.no_grad()
    def take_loaded(self, updates: int, loaded: object) -> None:
        """Takes over what was read into the tensors of `sharded`; what the load returned is not needed. ``updates``: of the state."""
        inner = self._optimizer.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            inner._sync_hdo_state_to_sub_optimizers()
        elif self._optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            for parameter, _, tensors in self._slices:
                self._optimizer._set_main_param_and_optimizer_states(parameter, tensors)
        for group in inner.param_groups:
            group.pop("step", None)
            if updates:
                group["step"] = updates

    def _tensors(self, parameter: Tensor) -> dict[str, Tensor]:
        found = self._optimizer._get_main_param_and_optimizer_states(parameter)
        return {state: tensor.detach() for state, tensor in found.items() if state != "step"}


def _spans(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yields the parameters of which this rank updates a slice, each with its ranges. Other instances of the optimizer have copies."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                yield from bucket["param_map"].items()


def _boxes(base: ShardedBase, prefix: str, shape: tuple[int, ...], start: int, held: Tensor) -> Iterator[ShardedTensor]:
    """Yields a slice of a parameter as boxes. ``start``: its first element in the parameter. ``held``: [its elements]."""
    layout = torch.empty(shape, device="meta")
    if isinstance(base, ShardedTensorFactory):
        made = base.build_fn(prefix + base.key, layout, base.replica_id, None)
    else:
        assert isinstance(base, ShardedTensor)
        made = replace(base, key=prefix + base.key, data=layout, dtype=layout.dtype)
    for whole in nested_values({"made": made}):
        view, first = whole.data, whole.data.storage_offset()
        if not is_ordered(view.shape, view.stride()):
            raise ValueError(f"{whole.key}: shape {tuple(view.shape)}, strides {view.stride()}: a slice of it is no set of boxes")
        lowest, highest = (elements_before(position - first, view.shape, view.stride()) for position in (start, start + held.numel()))
        for offsets, sizes in boxes_of_interval(lowest, highest, view.shape):
            at = first + sum(o * s for o, s in zip(offsets, view.stride(), strict=True)) - start
            data = held.as_strided(sizes, view.stride(), held.storage_offset() + at)
            yield boxed(whole, offsets, data)


def boxed(whole: ShardedTensor, offsets: tuple[int, ...], data: Tensor) -> ShardedTensor:
    """Returns the part of a sharded tensor that begins at ``offsets`` of its local shape. ``data``: the part's."""
    extra = whole.prepend_axis_num
    first = (*whole.global_offset[:extra], *(a + b for a, b in zip(whole.global_offset[extra:], offsets, strict=True)))
    shape = (1,) * extra + tuple(data.shape)
    return replace(
        whole,
        data=data[(None,) * extra],
        dtype=data.dtype,
        local_shape=shape,
        global_offset=first,
        axis_fragmentations=None,
        prepend_axis_num=0,
    )


def in_pieces(tensor: ShardedTensor) -> Iterator[ShardedTensor]:
    """Yields a sharded tensor in parts of at most `PIECE_BYTES`: views of its data."""
    assert tensor.data is not None
    for offsets, sizes in pieces(tensor.local_shape, tensor.dtype.itemsize, PIECE_BYTES):
        part = tensor.data[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        yield boxed(tensor, offsets, part)


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
        copies = {index: host_copy(value) for index, value in values.items() if self.copied and isinstance(value, Tensor)}
        self._data = values | copies  # what is no tensor is serialized already
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
    sizes = {name: base.data.nbytes if isinstance(base.data, Tensor) else 0 for name, base in held.items()}
    everyone = gather_json({name: [sizes[name], _is_main(base)] for name, base in held.items()})
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


def _is_main(base: ShardedBase) -> bool:
    """Returns whether a part is one of those that make up the whole. The last of a replica's indices is its data-parallel rank, which says
    nothing: replicas are cut alike, and slices of an optimizer are each rank's own."""
    replica = base.replica_id
    return replica == 0 if isinstance(replica, int) else all(index == 0 for index in replica[:-1])


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _encoded(result: WriteResult) -> list[Any]:
    index, stored = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, stored.relative_path, stored.offset, stored.length]


def _decoded(result: list[Any]) -> tuple[MetadataIndex, _StorageInfo]:
    name, offset, index, path, start, length = result
    return MetadataIndex(name, None if offset is None else torch.Size(offset), index), _StorageInfo(path, start, length)
