"""Collectives that a backward pass goes through: what ranks exchange that share matrices, sequences or experts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def gathered(tensor: Tensor, group: Group) -> Tensor:
    """Returns the tensors of all ranks, of one shape, end to end; without a gradient."""
    found = tensor.new_empty((group.size() * tensor.size(0), *tensor.shape[1:]))
    dist.all_gather_into_tensor(found, tensor.contiguous(), group=group)
    return found


def _own_sum(tensor: Tensor, group: Group) -> Tensor:
    """Returns this rank's part of the sum of all ranks' tensors."""
    found = tensor.new_empty((tensor.size(0) // group.size(), *tensor.shape[1:]))
    dist.reduce_scatter_tensor(found, tensor.contiguous(), group=group)
    return found


def _sum(tensor: Tensor, group: Group) -> Tensor:
    found = tensor.contiguous().clone()
    dist.all_reduce(found, group=group)
    return found


class Copied(torch.autograd.Function):
    """Hands the same tensor to layers of which each rank has a piece: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class Summed(torch.autograd.Function):
    """Adds up what the ranks' pieces give, for layers that all ranks compute alike."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Gathered(torch.autograd.Function):
    """Joins ranks' rows, each of which uses all of them for something else: a row's gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_sum(gradient, ctx.group), None


class SharedOut(torch.autograd.Function):
    """Adds up ranks' tensors, and gives each rank its part of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own_sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group), None


class OwnPart(torch.autograd.Function):
    """Takes this rank's part of rows that all ranks have: their gradients are joined."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return rows.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group), None


class Joined(torch.autograd.Function):
    """Joins ranks' rows for a loss that all of them compute alike: each one's rows have its own gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class Share(torch.autograd.Function):
    """Leaves a tensor as it is, and counts its gradient, which all of ``ranks`` have, once in their sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
