"""The rows of a parameter that a rank of FSDP2 holds."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a parameter, or the tensor itself where it is not sharded; no copy."""
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def shard_ranks(tensor: DTensor) -> tuple[int, int]:
    """Returns this rank's place among the ranks that share a parameter's rows, and their number."""
    mesh = tensor.device_mesh
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def shard_group(tensor: Tensor) -> dist.ProcessGroup:
    """Returns the ranks that share a parameter's rows."""
    assert isinstance(tensor, DTensor)
    group: dist.ProcessGroup = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
    return group


def rows_of(tensor: Tensor, rank: int | None = None) -> tuple[int, int]:
    """Returns the first row of a shard and the row behind it: FSDP2 cuts as `torch.chunk` does. What is not sharded is one shard.

    Args:
        rank: the shard's place among the ranks that share the rows; None for this rank's.
    """
    size = tensor.shape[0] if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return 0, size
    own, ranks = shard_ranks(tensor)
    each, place = -(-size // ranks), own if rank is None else rank
    return min(place * each, size), min((place + 1) * each, size)


def shard_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """Returns this rank's rows of a whole parameter."""
    return whole[slice(*rows_of(parameter))] if isinstance(parameter, DTensor) else whole


def is_first_copy(parameter: Tensor) -> bool:
    """Returns whether this rank's shard is of the first of the model's copies, of which checkpoints are made."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    return parameter.device_mesh.ndim == 1 or parameter.device_mesh.get_local_rank(0) == 0
