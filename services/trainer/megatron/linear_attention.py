"""Gated delta net (Yang et al. 2024) over packed sequences, in the place of Megatron's module, which takes none.

Each value head has a state, a matrix [key width, value width]. A token lets it decay, replaces what it holds at the token's key by the
token's value, in part, and reads it at the token's query. Neither the state nor the convolution before it goes from one sequence of a pack
to the next. Under context parallelism the ranks exchange their tokens of all heads for whole sequences of some heads, and back.

On a GPU the kernels of flash-linear-attention compute it in half precision where that package is installed. Elsewhere it is plain
PyTorch: within chunks of `CHUNK` tokens, for all of a pack at once, the tokens' replacements are the solution of a triangular system; from
chunk to chunk goes the state, for all sequences at once. Its backward pass computes the forward pass again: its matrices are larger than
its inputs.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import all_to_all, copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from services.trainer.megatron.packed_sequences import ContextSplit, PackedSequences

CHUNK = 64
NORM_EPS = 1e-6  # of the lengths of queries and keys, a constant of the models

# Megatron's module is taken for its parameters and their places in checkpoints; it refuses to be built without kernels it would call
gated_delta_net.HAVE_FLA = True


@functools.cache
def fast_rule() -> Callable[..., Any] | None:
    """Returns flash-linear-attention's kernel; None where it is not installed, or there is no GPU."""
    if not torch.cuda.is_available():
        return None
    if importlib.util.find_spec("fla") is None:
        structlog.get_logger().warning("linear_attention_in_plain_torch", install="flash-linear-attention")
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rule: Callable[..., Any] = chunk_gated_delta_rule
    return rule


@dataclass(frozen=True)
class ChunkedSequences:
    """A pack's tokens in chunks that begin anew with every sequence.

    Args:
        places: int64 [T], of each token among the chunks' places.
        order: for every step of the recurrence, int64 the numbers of the chunks that take part in it: the step-th of each sequence that has
            so many, longest first, so that those of the next step are the first of them.
        count: chunks.
    """

    places: Tensor
    order: list[Tensor]
    count: int

    @classmethod
    def of(cls, starts: Tensor, size: int = CHUNK) -> "ChunkedSequences":
        """Divides sequences that begin at ``starts``, integers [S + 1], whose last entry is T."""
        device, bounds = starts.device, starts.cpu().long()
        lengths = bounds.diff()
        chunks = (lengths + size - 1) // size
        firsts = chunks.cumsum(0) - chunks
        places = torch.arange(int(bounds[-1])) + torch.repeat_interleave(firsts * size - bounds[:-1], lengths)
        by_length = chunks.argsort(descending=True, stable=True)
        order = [(firsts[by_length] + step)[chunks[by_length] > step].to(device) for step in range(int(chunks.max()))]
        return cls(places.to(device), order, int(chunks.sum()))

    def laid_out(self, tokens: Tensor, size: int = CHUNK) -> Tensor:
        """Returns float32 [chunks, heads, size, ...] of [T, heads, ...], zero where there is no token."""
        room = tokens.new_zeros(self.count * size, *tokens.shape[1:], dtype=torch.float32)
        return room.index_copy(0, self.places, tokens.float()).unflatten(0, (self.count, size)).transpose(1, 2)


def plain_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, pack: ChunkedSequences) -> Tensor:
    """Computes the gated delta rule.

    Args:
        query, key: [T, heads, key width], of length 1. value: [T, heads, value width]. decay: float32 [T, heads], the logarithm of what is
            left of the state at each token. strength: float32 [T, heads], the part that is replaced.

    Returns float32 [T, heads, value width].
    """
    q, k, v, g, beta = (pack.laid_out(tensor) for tensor in (query, key, value, decay, strength))
    q, g = q * q.size(-1) ** -0.5, g.cumsum(-1)  # since the chunk began
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    left = (g[..., :, None] - g[..., None, :]).masked_fill(~earlier, -torch.inf).exp()
    between = (beta[..., None] * (k @ k.mT) * left).tril(-1)
    given = torch.cat([v, g.exp()[..., None] * k], -1) * beta[..., None]
    # what each token adds to the state at its key: a part of its own, less what the state at the chunk's begin holds there
    solved = torch.linalg.solve_triangular(between, given, upper=False, unitriangular=True)
    own, held = solved.split([v.size(-1), k.size(-1)], -1)
    seen, asked = (q @ k.mT) * left, q * g.exp()[..., None]
    kept, remembered = g[..., -1].exp()[..., None, None], k * (g[..., -1:] - g).exp()[..., None]
    outputs, state = [], q.new_zeros(len(pack.order[0]), q.size(1), k.size(-1), v.size(-1))
    for chunks in pack.order:
        state = state[: len(chunks)]
        added = own[chunks] - held[chunks] @ state
        outputs.append(asked[chunks] @ state + seen[chunks] @ added)
        state = kept[chunks] * state + remembered[chunks].mT @ added
    in_order = torch.cat(outputs)[torch.cat(pack.order).argsort()]
    return in_order.transpose(1, 2).flatten(0, 1)[pack.places]


def convolved(states: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Returns [T, channels] of the same: every channel convolved with its own kernel, [channels, 1, width], over a token and those before
    it in its sequence."""
    before = weight.size(-1) - 1
    lengths = starts.diff().long()
    numbers = torch.repeat_interleave(torch.arange(len(lengths), device=starts.device), lengths, output_size=states.size(0))
    places = torch.arange(states.size(0), device=starts.device) + before * numbers  # zeros before every sequence
    apart = states.new_zeros(states.size(0) + before * len(lengths), states.size(1)).index_copy(0, places + before, states)
    return F.conv1d(apart.T[None], weight, groups=states.size(1))[0].T[places]


def to_heads(tokens: list[Tensor], split: ContextSplit) -> tuple[Tensor, ...]:
    """Returns [T, columns / ranks] of each of [U, columns]: the pack's tokens and this rank's heads, of its own tokens and all heads."""
    ranks = split.group.size()
    apart = torch.cat([each.unflatten(1, (ranks, -1)) for each in tokens], -1).transpose(0, 1).flatten(0, 1)
    return all_to_all(split.group, apart).index_select(0, split.back).split([each.size(1) // ranks for each in tokens], -1)


def to_tokens(heads: Tensor, split: ContextSplit) -> Tensor:
    """Returns [U, columns * ranks] of [T, columns], the way back; zeros in the padding."""
    ranks = split.group.size()
    rows = heads.new_zeros(ranks * split.rows.numel(), heads.size(1)).index_copy(0, split.back, heads)
    return all_to_all(split.group, rows).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)


class PackedGatedDeltaNet(gated_delta_net.GatedDeltaNet):
    """A layer's linear attention. Tensor-parallel ranks share its heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            parameter.partition_dim, parameter.partition_stride = 0, 1  # Megatron says that they are split, and not how
        # of all heads alike: summed over their ranks in the backward pass, with sequence parallelism and without
        self.out_norm.weight.sequence_parallel = False

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: PackedSequences | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Takes [U, 1, hidden size], this rank's tokens under sequence parallelism, and returns the same, and no bias."""
        assert packed_seq_params is not None and packed_seq_params.shared is None
        starts, ranks, context = packed_seq_params.cu_seqlens_q, self.tp_size, packed_seq_params.context
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        heads, widths = self.num_value_heads // ranks, [width // ranks for width in (self.qk_dim, self.qk_dim, self.v_dim)]
        *mixed, gate, beta, alpha = projected.split([*widths, self.v_dim // ranks, heads, heads], -1)
        kernels, bias, rate = list(self.conv1d.weight.split(widths)), self.dt_bias, self.A_log
        if context is not None:
            *mixed, beta, alpha = to_heads([*mixed, beta, alpha], context)
            rank, size = context.group.rank(), context.group.size()
            *kernels, bias, rate = (parameter.chunk(size)[rank] for parameter in (*kernels, bias, rate))
            starts = context.starts
        joint = F.silu(convolved(torch.cat(mixed, -1), torch.cat(kernels), starts))
        query, key, value = joint.split([part.size(1) for part in mixed], -1)
        repeats = self.num_value_heads // self.num_key_heads
        query, key = (_of_length_one(one.unflatten(-1, (-1, self.key_head_dim))).repeat_interleave(repeats, 1) for one in (query, key))
        value = value.unflatten(-1, (-1, self.value_head_dim))
        decay = -rate.float().exp() * F.softplus(alpha.float() + bias.float())
        output = self._rule(query, key, value, decay, beta.float().sigmoid(), packed_seq_params, starts)
        if context is not None:
            output = to_tokens(output.flatten(1), context).unflatten(1, (heads, -1))
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.pg_collection.tp)
        normed = F.rms_norm(output.float(), weight.shape, weight.float(), self.out_norm.eps)
        gated = (normed.flatten(1) * F.silu(gate.float())).to(projected.dtype)
        projection: tuple[Tensor, Tensor | None] = self.out_proj(gated[:, None])
        return projection

    def _rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, sequences: PackedSequences, starts: Tensor
    ) -> Tensor:
        if query.dtype != torch.float32 and (rule := fast_rule()) is not None:
            rows = (tensor[None] for tensor in (query, key, value.contiguous()))
            output: Tensor = rule(*rows, g=decay[None], beta=strength[None].to(query.dtype), cu_seqlens=starts.long())[0][0]
            return output
        if sequences.chunks is None:
            sequences.chunks = ChunkedSequences.of(starts)
        plain: Tensor = checkpoint(
            plain_rule, query, key, value, decay, strength, sequences.chunks, use_reentrant=False, preserve_rng_state=False
        )
        return plain


def _of_length_one(states: Tensor) -> Tensor:
    wide = states.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)).to(states.dtype)
