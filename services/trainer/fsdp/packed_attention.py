"""Layers of transformers' models that keep the sequences of a pack apart, and which of its tokens a rank computes, where ranks share
sequences or, behind the layers, tokens.

Attention is registered there under `NAME`. On a GPU in half precision the kernels of `services.trainer.parallel.varlen_attention` do the
work; elsewhere, scaled dot-product attention does it sequence by sequence. No mask of T x T tokens is ever made. Where there is no kernel,
scores are computed by pieces of bounded size, again in the backward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from services.trainer.fsdp.all_ranks import joined, rows_of_all
from services.trainer.parallel.trained_model import AttentionChange
from services.trainer.parallel.varlen_attention import LongSequences, by_length, fits, long_sequences, varlen
from shared.runtime.errors import MyxoError
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


NAME = "packed"
PLACES = ("position_ids", "cu_seq_lens_q", "seq_idx")  # tensors that models hand on to attention, which knows as much by `Sequences`
SCORES = 2**25  # that exist at a time where there is no kernel; `shared.model.memory_plan` counts them


@dataclass(frozen=True)
class Sequences:
    """The sequences of a pack. ``starts``: of each, and T. ``cu_seqlens``: the same, int32 [S + 1] on the model's device.

    Args:
        part: what this rank computes of them, where ranks share sequences.
    """

    starts: list[int]
    cu_seqlens: Tensor
    part: ContextPart | None = None

    @cached_property
    def long(self) -> LongSequences | None:
        return long_sequences(self.starts, self.cu_seqlens.device)

    @property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """Returns starts and stops of queries and of the keys that these see, each up to its own."""
        return [(*span, *span) for span in pairwise(self.starts)] if self.part is None else self.part.spans

    @property
    def longest(self) -> int:
        return max(stop - start for start, stop in zip(self.starts, self.starts[1:], strict=False))


@torch.compiler.disable  # the bounds of sequences are another program for each pack
def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_sequences: Sequences | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Takes ``query`` [1, heads, T, width], ``key`` and ``value`` [1, key/value heads, T, width]. Returns [1, T, heads, width], and None.

    Args:
        packed_sequences: a model hands on to its layers what it is called with. It is an argument, since a layer may be computed again in
            the backward pass.

    Of ``options``, ``s_aux`` [heads] are logits of sinks, and ``softcap`` bounds the scores, for which there is no kernel; ``indices`` are
    the keys that an indexer has chosen: all of a sequence of at most ``index_topk`` tokens.

    Raises MyxoError: the model does not hand sequences on, has other keys than these, or wants some of them alone.
    """
    sinks, cap, sequences = options.pop("s_aux", None), options.get("softcap"), packed_sequences
    if attention_mask is not None or not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise MyxoError(f"attention {NAME!r} has no masks, which {type(module).__name__} asks for")
    if sequences is None:
        raise MyxoError(f"{type(module).__name__} does not say which sequences are packed")
    _check_keys(module, sequences, key.size(2) == query.size(2), **options)
    if sequences.part is not None:
        key, value = sequences.part.all_rows(key), sequences.part.all_rows(value)
    if query.is_cuda and cap is None and query.dtype != torch.float32:
        return _by_kernel(query, key, value, sequences, scaling, sliding_window, sinks)[None], None
    outputs: list[Tensor] = []
    for start, stop, first, last in sequences.spans:
        q, k, v = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        if sinks is not None or cap is not None:
            outputs += _by_scores(q, k, v, sliding_window, scaling, sinks, cap)
            continue
        whole, gqa = q.size(2) == k.size(2) <= (sliding_window or k.size(2)), q.size(1) != k.size(1)
        seen = None if whole else _seen(q, k, sliding_window)
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=whole, scale=scaling, enable_gqa=gqa))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _check_keys(module: Any, sequences: Sequences, of_tokens: bool, indices: Tensor | None = None, **options: Any) -> None:
    """Raises MyxoError where a query is to see other keys than those of its sequence's tokens up to its own."""
    kind, most = type(module).__name__, 0 if indices is None else module.config.index_topk
    if indices is not None and sequences.longest > most:
        raise MyxoError(f"{kind} chooses {most} of a sequence's {sequences.longest} keys; attention {NAME!r} takes all")
    strange = [name for name, one in options.items() if isinstance(one, Tensor) and name not in PLACES]
    if strange or not of_tokens:
        raise MyxoError(f"attention {NAME!r} does not know {', '.join(strange) or 'keys that are no tokens'}, which {kind} hands it")


def _seen(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """Returns the keys that each of the last queries sees, bool [queries, keys]."""
    behind = k.size(2) - q.size(2)
    seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril(behind)
    return seen if window is None else seen.triu(1 - window + behind)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scaling: float | None, window: int | None, sinks: Tensor | None
) -> Tensor:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if sequences.part is not None:
        keys = sequences.part.keys
        return varlen(q, k.index_select(0, keys), v.index_select(0, keys), sequences.part.lengths, scaling, window or 0, sinks)
    if sequences.long is not None and not window and sinks is None and fits(q, v):
        return by_length(q, k, v, sequences.long, scaling)
    return varlen(q, k, v, (sequences.cu_seqlens, sequences.cu_seqlens, sequences.longest, sequences.longest), scaling, window or 0, sinks)


def _by_scores(q: Tensor, k: Tensor, v: Tensor, window: int | None, *options: Any) -> Iterator[Tensor]:
    """Attends within one sequence by scores; the arguments are those of `attend`. Yields [1, heads, queries, width], in order."""
    behind, rows = k.size(2) - q.size(2), max(1, SCORES // (q.size(1) * k.size(2)))
    for first in range(0, q.size(2), rows):
        last = min(first + rows, q.size(2))
        seen = slice(0 if window is None else max(0, behind + first + 1 - window), behind + last)
        given = q[:, :, first:last], k[:, :, seen], v[:, :, seen], window, *options
        yield checkpoint(_of_scores, *given, use_reentrant=False, preserve_rng_state=False)


def _of_scores(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, scaling: float | None, sinks: Tensor | None, cap: float | None
) -> Tensor:
    seen = _seen(q, k, window)
    k, v = (tensor.repeat_interleave(q.size(1) // tensor.size(1), 1) for tensor in (k, v))
    scores = q @ k.transpose(2, 3) * (q.size(3) ** -0.5 if scaling is None else scaling)
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    scores = scores.float().masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(1, -1, scores.size(2), 1)], 3)
    return scores.softmax(3)[..., : k.size(2)].to(v.dtype) @ v


def keep_sequences_apart(model: torch.nn.Module) -> None:
    """Has layers of gated delta rules (Qwen3-Next, Qwen3.5) start anew with each sequence, where they lack the kernels that do so
    themselves (flash-linear-attention, causal-conv1d), and angles that depend on a sequence's length (Phi's) on that of its own.

    Layers are called with ``cu_seq_lens_q`` and ``seq_idx``."""
    module: Any
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.forward = partial(_rotated_apart, module.forward)
        rule: Any = getattr(module, "chunk_gated_delta_rule", None)
        if rule is not None and getattr(rule, "__name__", "").startswith("torch_"):
            module.chunk_gated_delta_rule = partial(_ruled_apart, rule)
        if hasattr(module, "causal_conv1d_fn") and module.causal_conv1d_fn is None:
            module.causal_conv1d_fn = _convolved_apart


def _ruled_apart(
    rule: Any, *tensors: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Calls transformers' rule for each sequence. ``tensors``: queries, keys, values [1, T, ...], as ``g`` and ``beta`` are."""
    lengths = [tensors[0].size(1)] if cu_seqlens is None else cu_seqlens.diff().tolist()
    parts = zip(*(tensor.split(lengths, 1) for tensor in (*tensors, g, beta)), strict=True)
    return torch.cat([rule(*part[:-2], g=part[-2], beta=part[-1], **options)[0] for part in parts], 1), None


def _rotated_apart(rotary: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
    """Computes cosines and sines of each sequence, whose positions, [1, T], begin with 0."""
    starts = (position_ids[0] == 0).nonzero()[1:, 0].tolist()
    return tuple(torch.cat(parts, 1) for parts in zip(*[rotary(x, one) for one in position_ids.tensor_split(starts, 1)], strict=True))


def _convolved_apart(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, seq_idx: Tensor | None = None
) -> Tensor:
    """Convolves each sequence of [1, channels, T] with the past of its own. ``seq_idx``: [1, T], the number of each token's sequence."""
    lengths = [x.size(2)] if seq_idx is None else torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    before = weight.size(1) - 1
    parts = [F.conv1d(F.pad(part, (before, 0)), weight[:, None], bias, groups=x.size(1)) for part in x.split(lengths, 2)]
    return F.silu(torch.cat(parts, 2)) if activation in ("silu", "swish") else torch.cat(parts, 2)


def observed(change: AttentionChange) -> Callable[[], None]:
    """Has ``change`` replace what attention gets and gives from now on. Returns what ends that."""

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> tuple[Tensor, None]:
        given = change(module.layer_idx, "before", [tensor[0].transpose(0, 1) for tensor in (query, key, value)])
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in given)
        output, _ = attend(module, query, key, value, *more, **options)
        return change(module.layer_idx, "after", [output[0]])[0][None], None

    AttentionInterface.register(NAME, watched)
    return lambda: AttentionInterface.register(NAME, attend)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
