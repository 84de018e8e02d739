"""The parallel groups of FSDP2, and what their ranks exchange in collectives that a backward pass goes through.

All ranks hold shards of one model. Ranks that share matrices (tensor parallelism) are next to one another, those that share sequences
(context parallelism) lie around them; both train on the same samples. Ranks that share experts are neighbours.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.model.parallel_layout import ParallelLayout

_made: dict[str, dist.ProcessGroup] = {}


def form(layout: ParallelLayout, timeout_seconds: float) -> None:
    """Forms the groups of more than one rank, ``tensor``, ``context``, ``batch`` (both) and ``expert``, and that of ``data``."""
    world, tensor, both = dist.get_world_size(), layout.tensor, layout.tensor * layout.context
    wanted = {
        "tensor": [range(first, first + tensor) for first in range(0, world, tensor)],
        "context": [range(block + own, block + both, tensor) for block in range(0, world, both) for own in range(tensor)],
        "batch": [range(first, first + both) for first in range(0, world, both)],
        "expert": [range(first, first + layout.expert) for first in range(0, world, layout.expert)],
        "data": [range(own, world, both) for own in range(both)],
    }
    for name, lists in wanted.items():
        if len(lists[0]) > 1 if name != "data" else both > 1:
            _form(name, lists, timedelta(seconds=timeout_seconds))


def _form(name: str, lists: Iterable[Iterable[int]], timeout: timedelta) -> None:
    for ranks in lists:
        group = dist.new_group(list(ranks), timeout=timeout)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            _made[name] = group


def leave() -> None:
    """Ends the groups."""
    for group in _made.values():
        dist.destroy_process_group(group)
    _made.clear()


def group(name: str) -> dist.ProcessGroup | None:
    """Returns this rank's group of a kind; None where it is alone."""
    return _made.get(name)


def seed(seed: int) -> None:
    """Does nothing: there are no streams but PyTorch's own."""


def random_states() -> dict[str, Any]:
    return {}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Does nothing."""


def data_parallel() -> dist.ProcessGroup:
    found = _made.get("data", dist.group.WORLD)
    assert found is not None
    return found


Group = dist.ProcessGroup
Step = Callable[[Tensor, Group], Tensor]


def gathered(tensor: Tensor, group: Group) -> Tensor:
    """Returns the tensors of all ranks, of one shape, end to end; without a gradient."""
    found = tensor.new_empty((group.size() * tensor.size(0), *tensor.shape[1:]))
    dist.all_gather_into_tensor(found, tensor.contiguous(), group=group)
    return found


def _own_sum(tensor: Tensor, group: Group) -> Tensor:
    found = tensor.new_empty((tensor.size(0) // group.size(), *tensor.shape[1:]))
    dist.reduce_scatter_tensor(found, tensor.contiguous(), group=group)
    return found


def _sum(tensor: Tensor, group: Group) -> Tensor:
    found = tensor.contiguous().clone()
    dist.all_reduce(found, group=group)
    return found


def _own(tensor: Tensor, group: Group) -> Tensor:
    return tensor.chunk(group.size())[group.rank()].clone()


def _same(tensor: Tensor, _: Group) -> Tensor:
    return tensor.view_as(tensor)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, forth: Step, back: Step) -> Tensor:
        ctx.group, ctx.back = group, back
        return forth(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient, ctx.group), None, None, None


def _exchange(forth: Step, back: Step) -> Step:
    def exchanged(tensor: Tensor, group: Group) -> Tensor:
        found: Tensor = _Exchange.apply(tensor, group, forth, back)
        return found

    return exchanged


copied = _exchange(_same, _sum)  # for layers of which each rank has a piece: the gradient is the sum of theirs
summed = _exchange(_sum, _same)  # of what the pieces give, for layers that all ranks compute alike
rows_of_all = _exchange(gathered, _own_sum)  # each rank uses all rows for something else: a row's gradient is the sum of theirs
own_sum = _exchange(_own_sum, gathered)  # each rank's part of the sum
own_part = _exchange(_own, gathered)  # of rows that all ranks have: their gradients are joined
joined = _exchange(gathered, _own)  # for a loss that all ranks compute alike: each one's rows have its own gradient
share = _exchange(_same, lambda gradient, group: gradient / group.size())  # a gradient that all ranks have counts once in their sum
