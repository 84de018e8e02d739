"""A pack of sequences as the model's layers take it.

The layers see T tokens end to end. Attention must not look across sequences; how it keeps them apart is prepared here
once a micro-batch instead of once a layer. On a GPU the kernels take ``cu_seqlens``. Elsewhere (see :mod:`.attention`)
sequences of similar length are laid side by side as the rows of one dense, right-padded batch: under a causal mask a
padded key is later than every real query, so no mask but the causal one is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from services.trainer.megatron.runtime import round_up
from services.trainer.packing import PackedBatch

SHORT = 16
"""Sequences up to this many tokens share one batch, whatever padding that costs."""

SIMILAR = 0.75
"""A sequence joins a batch of longer ones if it fills at least this share of a row."""


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


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters, and the dense batches for attention without a variable-length kernel.

    Args:
        groups: the dense batches; empty where a kernel takes ``cu_seqlens``.
        restore: int64 [T], for each token of the pack its row in the concatenated outputs of ``groups``; None if there is
            one group and it holds the pack as it is.
    """

    groups: list[LengthGroup] = field(default_factory=list)
    restore: Tensor | None = None


@dataclass
class ModelInput:
    """What one forward pass takes.

    Args:
        tokens: int64 [1, T]. positions: int64 [1, T], place within the sequence. sequences: where they begin and end.
        padding: tokens at the end that were added only to make T divisible; the caller cuts them off again.
    """

    tokens: Tensor
    positions: Tensor
    sequences: PackedSequences
    padding: int


def model_input(batch: PackedBatch, multiple: int, dense: bool, device: torch.device) -> ModelInput:
    """Prepare a micro-batch for the model.

    Args:
        batch: on any device; on the host, nothing here waits for a GPU. device: where the result goes.
        multiple: T is padded to a multiple of it, by one more sequence of zeros (sequence parallelism divides T by the
            tensor-parallel size). dense: whether to prepare the dense batches.
    """
    total = batch.tokens.numel()
    padding = round_up(total, multiple) - total
    starts = batch.cu_seqlens.tolist() + ([total + padding] if padding else [])
    tokens = torch.nn.functional.pad(batch.tokens, (0, padding))
    bounds = torch.tensor(starts)
    positions = torch.arange(total + padding) - torch.repeat_interleave(bounds[:-1], bounds.diff())
    cu_seqlens = bounds.int().to(device)
    longest = max(batch.max_seqlen, padding)
    groups, restore = length_groups(starts, device) if dense else ([], None)
    sequences = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        groups=groups,
        restore=restore,
    )
    return ModelInput(tokens[None].to(device), positions[None].to(device), sequences, padding)


def length_groups(starts: list[int], device: torch.device) -> tuple[list[LengthGroup], Tensor | None]:
    """Dense batches of similar lengths for sequences that begin at ``starts``, whose last entry is T.

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
