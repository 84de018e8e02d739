"""Context parallelism: the split of sequences among the ranks of a group, and the gathering of their parts.

With C ranks every sequence of a pack is cut into 2C chunks of one length (padded at its end to make it so), and rank c
takes chunks c and 2C - 1 - c: an early one that sees few keys and a late one that sees many, so that under a causal mask
all ranks do the same work. Keys and values are gathered over the group, queries stay where they are.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


@dataclass
class ContextSplit:
    """One rank's part of a pack, and the indices that restore the pack from all parts.

    Args:
        group: the ranks that share the sequences.
        rows: int64 [U], for each token of this rank its position in the pack; -1 in the padding.
        back: int64 [T], for each token of the pack its row in what the ranks' parts make, gathered in rank order.
        keys: int64 [K], for each chunk of this rank in turn the rows of the gathered keys that it sees, oldest first.
        spans: for each chunk of this rank its queries and the keys that it sees; the last query sees the last key.
        cu_queries, cu_keys: int32 [chunks + 1], where the chunks begin among the queries and among ``keys``.
    """

    group: dist.ProcessGroup
    rows: Tensor
    back: Tensor
    keys: Tensor
    spans: list[tuple[int, int]]
    cu_queries: Tensor
    cu_keys: Tensor

    def own(self, per_token: Tensor) -> Tensor:
        """Returns this rank's part [U] of a pack's [T]; 0 in the padding."""
        return torch.where(self.rows >= 0, per_token[self.rows.clamp(min=0)], 0)

    def whole(self, per_token: Tensor) -> Tensor:
        """Returns the pack's [T, ...] of every rank's part [U, ...]. Every rank of the group must compute the same from it:
        the gradient is this rank's part of the upstream one, counted once."""
        gathered = gather_from_sequence_parallel_region(per_token, tensor_parallel_output_grad=False, group=self.group)
        return gathered.index_select(0, self.back)


def padded_starts(starts: list[int], size: int, tensor: int) -> list[int]:
    """Returns where a pack's sequences begin once every one of them divides into 2 ``size`` chunks.

    Args:
        starts: of the sequences, and T. tensor: ranks that split each part once more (sequence parallelism), else 1; a
            sequence of padding makes that even.
    """
    pair = 2 * size
    padded = [0]
    for start, stop in pairwise(starts):
        padded.append(padded[-1] + -(-(stop - start) // pair) * pair)
    multiple = pair * tensor if tensor % 2 else size * tensor
    missing = -padded[-1] % multiple
    return [*padded, padded[-1] + missing] if missing else padded


def split(starts: list[int], padded: list[int], group: dist.ProcessGroup, rank: int, device: torch.device) -> ContextSplit:
    """Splits a pack for rank ``rank`` of ``group``. ``starts``: of its sequences, and T; ``padded``: see :func:`padded_starts`."""
    size = group.size()
    part = padded[-1] // size
    own = [*starts, *starts[-1:] * (len(padded) - len(starts))]
    rows, back, keys, spans = [], [], [], []
    for (first, last), (start, stop) in zip(pairwise(own), pairwise(padded), strict=True):
        length, width = last - first, (stop - start) // (2 * size)
        steps = torch.arange(width)
        # for every token of the padded sequence: its row in the gathered parts
        where = torch.empty(2 * size, width, dtype=torch.int64)
        for owner in range(size):
            where[owner] = owner * part + start // size + steps
            where[2 * size - 1 - owner] = owner * part + start // size + width + steps
        where = where.flatten()
        back.append(where[:length])
        for chunk in (rank, 2 * size - 1 - rank):
            positions = chunk * width + steps
            rows.append(torch.where(positions < length, first + positions, -1))
            keys.append(where[: (chunk + 1) * width])
            spans.append((width, (chunk + 1) * width))
    bounds = torch.tensor([(0, 0), *spans]).cumsum(0).int()
    return ContextSplit(
        group,
        torch.cat(rows).to(device),
        torch.cat(back).to(device),
        torch.cat(keys).to(device),
        spans,
        bounds[:, 0].contiguous().to(device),
        bounds[:, 1].contiguous().to(device),
    )


def gather_keys_and_values(key: Tensor, value: Tensor, split: ContextSplit) -> tuple[Tensor, Tensor]:
    """Returns keys [U, heads, width] and values (of another width, perhaps) of all ranks, as this rank's chunks see them: [K, ...].

    Differentiable: a key's gradient is summed over the ranks whose queries have seen it.
    """
    joined = torch.cat([key.flatten(1), value.flatten(1)], 1)
    gathered = gather_from_sequence_parallel_region(joined, tensor_parallel_output_grad=True, group=split.group)
    keys, values = gathered.index_select(0, split.keys).split([key[0].numel(), value[0].numel()], 1)
    return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])
