"""The order of tokens by their experts, and back, without waiting for a GPU.

Every token goes to the same number of experts, so the sizes of everything are known before the choice is. Both directions only gather: a
token reads its rows, a row its token. Scattering would add in an order that varies, and atomically.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TokenPermutation:
    """Where tokens lie once they are ordered by their experts, and by their place among the tokens of an expert.

    Args:
        tokens: int64 [N * K], the token of each row. chosen: int64 [N * K], each row's index in a matrix [experts, N].
        rows: int64 [N, K], the rows of each token.
    """

    tokens: Tensor
    chosen: Tensor
    rows: Tensor

    @classmethod
    def of(cls, routing_map: Tensor, per_token: int) -> "TokenPermutation":
        """Makes that of bool [N, experts], of which ``per_token`` are true for each token."""
        count, device = routing_map.size(0), routing_map.device
        flat = routing_map.T.reshape(-1)
        total = count * per_token
        # one more row takes what is not chosen
        places = torch.where(flat, flat.cumsum(0) - 1, total)
        chosen = torch.empty(total + 1, dtype=torch.int64, device=device)
        chosen = chosen.scatter_(0, places, torch.arange(flat.numel(), device=device))[:total]
        tokens = chosen % max(count, 1)
        rows = torch.argsort(tokens, stable=True).view(count, per_token)
        return cls(tokens, chosen, rows)

    def ordered(self, hidden: Tensor) -> Tensor:
        """Returns [N * K, H] of the tokens' [N, H]."""
        ordered: Tensor = _Ordered.apply(hidden, self.tokens, self.rows)
        return ordered

    def restored(self, ordered: Tensor) -> Tensor:
        """Returns the tokens' [N, H], each the sum of its rows, of [N * K, H]."""
        restored: Tensor = _Restored.apply(ordered, self.tokens, self.rows)
        return restored

    def weights(self, probs: Tensor) -> Tensor:
        """Returns the rows' weights [N * K] of [N, experts]."""
        return probs.T.reshape(-1).index_select(0, self.chosen)


def _sums(ordered: Tensor, rows: Tensor) -> Tensor:
    if ordered.is_cuda:  # in one kernel, which adds in float32
        return F.embedding_bag(rows, ordered, mode="sum")
    return ordered.index_select(0, rows.reshape(-1)).view(*rows.shape, -1).sum(1)


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return hidden.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _sums(gradient.contiguous(), rows), None, None


class _Restored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ordered: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sums(ordered, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return gradient.index_select(0, tokens), None, None
