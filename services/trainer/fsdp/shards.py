"""The part of a parameter that a rank of FSDP2 holds: rows of it, or of the piece that tensor or expert parallelism gives the rank."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Split:
    """A dimension along which ranks share a parameter before FSDP2 cuts each one's piece. Neighbouring ranks have neighbouring pieces."""

    dimension: int
    ranks: int


def mark(parameter: Tensor, split: Split | None) -> None:
    """Notes that a parameter is the piece of a whole that this rank has."""
    parameter._split = split  # type: ignore[attr-defined]


def split_of(tensor: Tensor) -> Split | None:
    found: Split | None = getattr(tensor, "_split", None)
    return found


def whole_shape(tensor: Tensor) -> torch.Size:
    """Returns the shape of the parameter that ranks hold parts of."""
    split = split_of(tensor)
    return torch.Size(size * split.ranks if split and index == split.dimension else size for index, size in enumerate(tensor.shape))


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a parameter, or the tensor itself where it is not sharded; no copy."""
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def shard_group(tensor: Tensor) -> dist.ProcessGroup:
    """Returns the ranks that share a parameter's rows."""
    assert isinstance(tensor, DTensor)
    group: dist.ProcessGroup = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
    return group


def box_of(tensor: Tensor, rank: int | None = None) -> tuple[slice, ...]:
    """Returns the part of the whole that is a shard: FSDP2 cuts rows as `torch.chunk` does. What is not sharded is one shard.

    Args:
        rank: whose shard, in the order of the ranks that hold the parameter; None for this one's.
    """
    box = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor) and box:
        split, group = split_of(tensor), shard_group(tensor)
        place = group.rank() if rank is None else rank if split is None else rank // split.ranks
        each = -(-tensor.shape[0] // group.size())
        box[0] = slice(min(place * each, tensor.shape[0]), min((place + 1) * each, tensor.shape[0]))
        if split is not None:
            first = (dist.get_rank() if rank is None else rank) % split.ranks * tensor.shape[split.dimension]
            box[split.dimension] = slice(first + box[split.dimension].start, first + box[split.dimension].stop)
    return tuple(box)


def shard_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """Returns this rank's part of a whole parameter."""
    return whole[box_of(parameter)] if isinstance(parameter, DTensor) else whole


def is_first_copy(parameter: Tensor) -> bool:
    """Returns whether this rank's shard is one of those that make up the whole once; others are copies."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    return split_of(parameter) is not None or 0 in dist.get_process_group_ranks(shard_group(parameter))
