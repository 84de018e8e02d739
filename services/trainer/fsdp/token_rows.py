"""Which tokens of a micro-batch a rank computes, where ranks share its sequences or, behind the layers, its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from services.trainer.fsdp.exchanges import joined, rows_of_all
from shared.schema.kept_tokens import Kept


@dataclass(frozen=True)
class TokenRows:
    """The shares of T tokens, which a sequence of padding makes up to a multiple of the ranks'.

    Of a context-parallel rank these are two pieces, one from each end: under a causal mask all have the same work.

    Args:
        count: T. context, tensor: ranks that share sequences, and matrices. place: this rank's among both, as `all_ranks` has them.
    """

    count: int
    context: int
    tensor: int
    place: int

    @property
    def total(self) -> int:
        """Returns the tokens with their padding."""
        multiple = self.tensor * (2 * self.context if self.context > 1 else 1)
        return -(-self.count // multiple) * multiple

    def pieces(self, place: int) -> list[tuple[int, int]]:
        """Returns start and stop of a context-parallel rank's pieces."""
        if self.context == 1:
            return [(0, self.total)]
        each = self.total // (2 * self.context)
        return [(number * each, (number + 1) * each) for number in (place, 2 * self.context - 1 - place)]

    def of_layers(self, place: int) -> Tensor:
        """Returns the tokens that a context-parallel rank's layers compute, int64."""
        return torch.cat([torch.arange(*piece) for piece in self.pieces(place)])

    @cached_property
    def own(self) -> Tensor:
        """Returns the tokens that this rank reads behind the layers, int64."""
        return self.of_layers(self.place // self.tensor).chunk(self.tensor)[self.place % self.tensor]

    def joined(self, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns [T, ...] of what each rank has read; all ranks compute the same with it."""
        order = torch.cat([self.of_layers(place) for place in range(self.context)]).argsort()
        return joined(own, group)[order.to(own.device)][: self.count]

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor in host memory, [T, ...]; padding is 0."""
        return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, self.total - self.count))[self.own]

    def kept(self, kept: Kept | None) -> Kept | None:
        """Returns this rank's kept tokens; there are none in the padding."""
        own = self.own.numpy()
        return None if kept is None else kept.at((own + 1) * (own < self.count) - 1)


@dataclass(frozen=True)
class ContextPart:
    """A context-parallel rank's queries, and the keys that they see: of each sequence in a piece, all up to the piece's end.

    Args:
        rows: of all tokens. starts: of the sequences, and T with the padding. group: the ranks that share them. device: the model's.
    """

    rows: TokenRows
    starts: list[int]
    group: dist.ProcessGroup
    device: torch.device

    @cached_property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """Returns starts and stops of queries, among this rank's, and of their keys, among all."""
        found, before = [], 0
        for first, last in self.rows.pieces(self.group.rank()):
            for start, stop in pairwise(self.starts):
                begin, end = max(first, start), min(last, stop)
                if begin < end:
                    found.append((before + begin - first, before + end - first, start, end))
            before += last - first
        return found

    @cached_property
    def _order(self) -> Tensor:
        return torch.cat([self.rows.of_layers(place) for place in range(self.group.size())]).argsort().to(self.device)

    def all_rows(self, own: Tensor) -> Tensor:
        """Returns keys or values of all tokens, [1, heads, T, width], of this rank's."""
        return rows_of_all(own[0].transpose(0, 1), self.group)[self._order].transpose(0, 1)[None]

    @cached_property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Returns starts of spans for queries and for their keys, int32, and the longest of both, as the kernel wants them."""
        queries, keys = ([stop - start for start, stop in (span[side : side + 2] for span in self.spans)] for side in (0, 2))
        bounds = [torch.tensor([0, *lengths]).cumsum(0).int().to(self.device) for lengths in (queries, keys)]
        return bounds[0], bounds[1], max(queries), max(keys)

    @cached_property
    def keys(self) -> Tensor:
        """Returns the keys of all spans end to end, int64."""
        return torch.cat([torch.arange(*span[2:]) for span in self.spans]).to(self.device)


def mapped(function: Callable[[Tensor], Tensor], found: Any) -> Any:
    """Returns tensors that a function was applied to: of one, or of a tuple."""
    return function(found) if isinstance(found, Tensor) else tuple(map(function, found))
