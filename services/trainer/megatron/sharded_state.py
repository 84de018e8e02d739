"""Megatron's sharded state of a model and its optimizer as parts of a checkpoint, and back.

The distributed optimizer's state is described in the dimensions of the parameters. A rank updates a slice of the flat buffer, which
begins and ends anywhere in a parameter. Each slice is named by the boxes that it makes up in its parameter, and they are written and read
where they lie.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from services.trainer.parallel.staged_shards import CheckpointPart, StagedShards, boxes_of_interval, elements_before, is_ordered

_PREFIX = "optimizer.state"


def stage(state: dict[str, Any], random: Any, shards: StagedShards, directory: Path) -> None:
    """Has the shards of a state staged that Megatron describes; see `services.trainer.parallel.trained_model.TrainedModel.stage_state`."""
    if random is not None:
        state = {**state, "random": _of_rank(random)}
    dist_checkpointing.save(state, str(directory), _Strategy(shards), validate_access_integrity=False)  # the whole is checked as planned


def read(state: dict[str, Any], directory: Path, with_random: bool, exact: bool) -> dict[str, Any]:
    """Reads such a state; see `services.trainer.parallel.trained_model.TrainedModel.read_state`."""
    if with_random:
        state = {**state, "random": _of_rank(None)}
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory), strict="raise_all" if exact else "assume_ok_unexpected")
    return loaded


def _of_rank(value: Any) -> ShardedObject:
    return ShardedObject("random", value, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


class _Strategy(TorchDistSaveShardedStrategy):
    """Hands the shards over. Megatron's own strategies start a process to write and another that re-imports ``__main__`` for the queue
    between them, which a service with threads and connections cannot afford."""

    def __init__(self, shards: StagedShards) -> None:
        super().__init__("torch_dist", 1)
        self._shards = shards

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Plans and copies the shards. The name is Megatron's. This is a collective of all ranks."""
        self._shards.stage([_part(base) for base in nested_values(sharded_state_dict)], Path(checkpoint_dir))


def _part(base: ShardedBase) -> CheckpointPart:
    main = base.replica_id == 0 if isinstance(base.replica_id, int) else all(index == 0 for index in base.replica_id[:-1])
    if isinstance(base, ShardedTensor):
        assert base.data is not None
        flat = boxed(base, tuple(0 for _ in base.local_shape), base.data)
        return CheckpointPart(flat.key, flat.data.detach(), tuple(flat.global_offset), tuple(flat.global_shape), main)
    assert isinstance(base, ShardedObject)
    written = io.BytesIO()
    torch.save([base.data], written)
    return CheckpointPart(base.unique_key, written, main=main)


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
    def take_loaded(self, steps: int, loaded: object) -> None:
        """Takes over what was read into the tensors of `sharded`; what the load returned is not needed. ``steps``: of the moments."""
        inner = self._optimizer.optimizer
        if self._optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            for parameter, _, tensors in self._slices:
                self._optimizer._set_main_param_and_optimizer_states(parameter, tensors)
        for group in inner.param_groups:
            group.pop("step", None)
            if steps:
                group["step"] = steps

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
