"""The input of the model's layers for a pack of sequences.

The layers see T tokens end to end. Attention must not look across sequences; how it keeps them apart is prepared here
once a micro-batch instead of once a layer. On a GPU the kernels take ``cu_seqlens``. Elsewhere (see :mod:`.attention`)
sequences of similar length are laid side by side as the rows of one dense, right-padded batch: under a causal mask a
padded key is later than every real query, so no mask but the causal one is needed.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from services.trainer.megatron.context_parallel import ContextSplit, padded_starts, split
from services.trainer.megatron.runtime import round_up
from services.trainer.packing import PackedBatch
from shared.model.parallel_layout import ParallelLayout

SHORT = 16
"""Sequences up to this many tokens share one batch, whatever padding that costs."""

SIMILAR = 0.75
"""A sequence joins a batch of longer ones if it fills at least this share of a row."""


LONG = 2048
"""Tokens from which a sequence counts as long on a GPU."""


@dataclass
class LengthGroup:
    """Sequences of similar length, as a dense batch.

    Args:
        rows: int64 [n * length], positions in the pack; in the padding, the position of the row's first token.
        length: tokens of a row. count: rows, n.
    """

    rows: Tensor
    length: int
    count: int


@dataclass(frozen=True)
class LongSequences:
    """A pack that has long sequences.

    Args:
        runs: the pack from end to end, as (start, stop, long): each long sequence alone, the others between them together.
        cu_short: int32, where the other sequences begin, laid end to end; None where there are none. longest_short: tokens.
    """

    runs: tuple[tuple[int, int, bool], ...]
    cu_short: Tensor | None
    longest_short: int


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters, and the dense batches for attention without a variable-length kernel.

    Args:
        groups: the dense batches; empty where a kernel takes ``cu_seqlens``.
        restore: int64 [T], for each token of the pack its row in the concatenated outputs of ``groups``; None if there is
            one group and it holds the pack as it is.
        context: this rank's part under context parallelism; ``cu_seqlens`` are then those of the whole, padded pack, and
            there are no groups.
        long: the plan for long sequences on a GPU, where there are some.
    """

    groups: list[LengthGroup] = field(default_factory=list)
    restore: Tensor | None = None
    context: ContextSplit | None = None
    long: LongSequences | None = None


@dataclass
class ModelInput:
    """The input of one forward pass.

    Args:
        tokens: int64 [1, U], this rank's: the pack's T, and padding. positions: int64 [1, U], place within the sequence.
        sequences: their starts and ends. labels: int64 [U].
        padding: tokens at the end that were added only to make T divisible; the caller cuts them off again.
    """

    tokens: Tensor
    positions: Tensor
    sequences: PackedSequences
    labels: Tensor
    padding: int

    def whole(self, per_token: Tensor) -> Tensor:
        """Returns the pack's [T, ...] of this rank's [U, ...]; see :meth:`ContextSplit.whole`."""
        if self.sequences.context is not None:
            return self.sequences.context.whole(per_token)
        return per_token[: per_token.size(0) - self.padding]


def model_input(
    batch: PackedBatch, layout: ParallelLayout, dense: bool, device: torch.device, group: dist.ProcessGroup | None = None
) -> ModelInput:
    """Prepares a micro-batch for the model.

    Args:
        batch: on any device; on the host, nothing here waits for a GPU. device: where the result goes.
        layout: sequence parallelism needs a T that the tensor-parallel ranks divide, context parallelism pads every
            sequence; other layouts take the pack as it is. dense: whether to prepare the dense batches.
        group: the context-parallel ranks, where there are several.
    """
    total = batch.tokens.numel()
    tensor = layout.tensor if layout.sequence_parallel else 1
    starts = batch.cu_seqlens.tolist()
    if group is not None and group.size() > 1:
        return _context_input(batch, starts, tensor, device, group)
    padding = round_up(total, tensor) - total
    starts += [total + padding] if padding else []
    tokens, labels = (torch.nn.functional.pad(t, (0, padding)).to(device) for t in (batch.tokens, batch.labels))
    bounds = torch.tensor(starts)
    positions = torch.arange(total + padding) - torch.repeat_interleave(bounds[:-1], bounds.diff())
    groups, restore = length_groups(starts, device) if dense else ([], None)
    long = None if dense else long_sequences(starts, device)
    sequences = _sequences(starts, max(batch.max_seqlen, padding), device, groups=groups, restore=restore, long=long)
    return ModelInput(tokens[None], positions[None].to(device), sequences, labels, padding)


def _context_input(batch: PackedBatch, starts: list[int], tensor: int, device: torch.device, group: dist.ProcessGroup) -> ModelInput:
    padded = padded_starts(starts, group.size(), tensor)
    part = split(starts, padded, group, group.rank(), device)
    bounds = torch.tensor(starts)
    places = torch.arange(starts[-1]) - torch.repeat_interleave(bounds[:-1], bounds.diff())
    tokens, labels, positions = (part.own(t.to(device)) for t in (batch.tokens, batch.labels, places))
    longest = max(stop - start for start, stop in pairwise(padded))
    sequences = _sequences(padded, longest, device, context=part)
    return ModelInput(tokens[None], positions[None], sequences, labels, 0)


def _sequences(starts: list[int], longest: int, device: torch.device, **more: Any) -> PackedSequences:
    cu_seqlens = torch.tensor(starts, dtype=torch.int32).to(device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **more,
    )


def length_groups(starts: list[int], device: torch.device) -> tuple[list[LengthGroup], Tensor | None]:
    """Makes dense batches of similar lengths for sequences that begin at ``starts``, whose last entry is T.

    Returns:
        The batches, longest first, and the order that brings their outputs back (see :class:`PackedSequences`).
    """
    spans = sorted(((stop - start, start) for start, stop in pairwise(starts) if stop > start), key=lambda s: (-s[0], s[1]))
    batches: list[list[tuple[int, int]]] = []
    for length, start in spans:
        longest = batches[-1][0][0] if batches else 0
        if not batches or (longest > SHORT and length < SIMILAR * longest):
            batches.append([])
        batches[-1].append((length, start))
    groups: list[LengthGroup] = []
    restore = torch.empty(starts[-1], dtype=torch.int64)
    offset = 0
    for batch in batches:
        width = batch[0][0]
        lengths = torch.tensor([length for length, _ in batch])
        first = torch.tensor([start for _, start in batch])
        steps = torch.arange(width)
        real = steps < lengths[:, None]
        rows = torch.where(real, first[:, None] + steps, first[:, None]).reshape(-1)
        restore[rows[real.reshape(-1)]] = offset + torch.nonzero(real.reshape(-1)).squeeze(1)
        groups.append(LengthGroup(rows.to(device), width, len(batch)))
        offset += rows.numel()
    if len(groups) == 1 and offset == len(restore) and torch.equal(restore, torch.arange(offset)):
        return groups, None
    return groups, restore.to(device)


def long_sequences(starts: list[int], device: torch.device) -> LongSequences | None:
    """Returns the plan for sequences that begin at ``starts``, whose last entry is T; None where none is long."""
    runs: list[tuple[int, int, bool]] = []
    short: list[int] = []
    for start, stop in pairwise(starts):
        is_long = stop - start >= LONG
        if not is_long:
            short.append(stop - start)
            if runs and not runs[-1][2]:
                start = runs.pop()[0]
        runs.append((start, stop, is_long))
    if not any(is_long for _, _, is_long in runs):
        return None
    bounds = torch.tensor([0, *short]).cumsum(0).int().to(device) if short else None
    return LongSequences(tuple(runs), bounds, max(short, default=0))
