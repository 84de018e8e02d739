"""Collectives that a backward pass goes through: what ranks exchange that share matrices, sequences or experts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
