"""The input of the model's layers for a pack of sequences.

The layers see T tokens end to end. Attention must not look across sequences; how it keeps them apart is prepared here once a micro-batch
instead of once a layer. On a GPU the kernels take ``cu_seqlens``. Elsewhere (see :mod:`.attention`) sequences of similar length are laid
side by side as the rows of one dense, right-padded batch: under a causal mask a padded key is later than every real query, so no mask but
the causal one is needed.

Where sequences begin alike, the layers see each beginning once (:mod:`services.trainer.packing`). The queries of a sequence are
then those of its own tokens, its keys are gathered from all of the tokens that it begins with, and each token is rotated by its own
place.

With C ranks every sequence of a pack is cut into 2C chunks of one length (padded at its end to make it so), and rank c takes chunks c and
2C - 1 - c: an early one that sees few keys and a late one that sees many, so that under a causal mask all ranks do the same work. Keys
and values are gathered over the group, queries stay where they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import megatron.core.models.common.embeddings.rope_utils as rope_utils
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.megatron.expert_balance import BalancedTokens, Balancing
from services.trainer.packing import PackedBatch, SharedPrefixes, prefixes_of
from services.trainer.parallel.runtime import round_up
from services.trainer.parallel.varlen_attention import LongSequences, long_sequences
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import ConfigError
from shared.schema.kept_tokens import Kept


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
        starts: int32, where the sequences begin in the pack, without padding, and T.
    """

    group: dist.ProcessGroup
    rows: Tensor
    back: Tensor
    keys: Tensor
    spans: list[tuple[int, int]]
    cu_queries: Tensor
    cu_keys: Tensor
    starts: Tensor

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
        torch.tensor(starts, dtype=torch.int32).to(device),
    )


def gather_keys_and_values(key: Tensor, value: Tensor, split: ContextSplit) -> tuple[Tensor, Tensor]:
    """Returns keys [U, heads, width] and values (of another width, perhaps) of all ranks, as this rank's chunks see them: [K, ...].

    Differentiable: a key's gradient is summed over the ranks whose queries have seen it.
    """
    joined = torch.cat([key.flatten(1), value.flatten(1)], 1)
    gathered = gather_from_sequence_parallel_region(joined, tensor_parallel_output_grad=True, group=split.group)
    keys, values = gathered.index_select(0, split.keys).split([key[0].numel(), value[0].numel()], 1)
    return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])


# the share of a micro-batch's tokens that ``auto`` wants saved: below it, kernels for whole sequences may be the faster ones
WORTHWHILE = 0.1


Setting = Literal["auto", "on", "off"]


def least_saved(setting: Setting, config: TransformerConfig, drafts: bool = False) -> float | None:
    """Returns the least share of a micro-batch's tokens that sharing must save; None where nothing is shared.

    Raises ConfigError: ``on``, where it would not be exact.
    """
    reason = obstacle(config, drafts)
    if setting == "on" and reason is not None:
        raise ConfigError("trainer.prefix_sharing", setting, f"auto or off: {reason}")
    if setting == "off" or reason is not None:
        return None
    return 0.0 if setting == "on" else WORTHWHILE


def obstacle(config: TransformerConfig, drafts: bool = False) -> str | None:
    """Returns why beginnings are not shared, unless the run says ``off``; None where they are. ``drafts``: whether draft layers train."""
    if drafts:
        return "what a draft layer sees at a fork differs with the next token"
    if config.apply_rope_fusion:
        return "the fused rotation counts places from each sequence's start"
    if config.context_parallel_size > 1:
        return "context parallelism cuts every sequence into the same number of parts"
    if config.transformer_impl != "local":
        return "Transformer Engine's attention takes whole sequences only"
    if config.linear_attention_freq is not None:
        return "linear attention hands its state from token to token of whole sequences"
    if config.dsa_indexer_topk is not None:
        return "indexers choose keys for whole sequences only"
    if Balancing.of(config) is not None:
        return "the balance of experts counts the tokens of whole sequences"
    return None


SHORT = 16  # Sequences up to this many tokens share one batch, whatever padding that costs
SIMILAR = 0.75  # A sequence joins a batch of longer ones if it fills at least this share of a row


@dataclass
class LengthGroup:
    """Sequences of similar length, as a dense batch.

    Args:
        rows: int64 [n * length], the queries' positions among the computed tokens; in the padding, the position of the row's first.
        length: queries of a row. count: rows, n.
        keys: int64 [n * keys of a row], likewise; ``rows`` itself where nothing is shared.
        seen: bool [n or 1, 1, length, keys of a row], the keys that a query sees; None: those up to its own.
    """

    rows: Tensor
    length: int
    count: int
    keys: Tensor
    seen: Tensor | None = None


@dataclass(frozen=True)
class SharedKeys:
    """The keys of sequences that share beginnings.

    Args:
        rows: int64 [K], for each sequence in turn its tokens' positions among the computed ones: its own, and those that it shares.
        cu_queries, cu_keys: int32 [S + 1], where the sequences begin among the computed tokens and in ``rows``; a sequence's last query is
            its last key. longest_queries, longest_keys: of one sequence.
    """

    rows: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    longest_queries: int
    longest_keys: int


@dataclass
class StageRouting:
    """The choices of the experts on one rank for a micro-batch (`services.trainer.megatron.moe`).

    Args:
        given: number of a layer, from 1 → integers [tokens of this rank's routers, experts a token], which take the place of the router's
            choice; -1: its own. recorded: gets the choices of the layers, int16; None: they are not needed.
    """

    given: dict[int, Tensor]
    recorded: dict[int, Tensor] | None = None


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters, and the dense batches for attention without a variable-length kernel.

    Megatron itself reads them to rotate queries and keys, and for nothing else.

    Args:
        groups: the dense batches; empty where a kernel takes ``cu_seqlens``.
        restore: int64 [T], for each token of the pack its row in the concatenated outputs of ``groups``; None if there is
            one group and it holds the pack as it is.
        context: this rank's part under context parallelism; ``cu_seqlens`` are then those of the whole, padded pack, and
            there are no groups.
        long: the plan for long sequences on a GPU, where there are some.
        shared: the keys where beginnings are shared; ``cu_seqlens`` are then those of one sequence.
        routing: the choices of the experts; None: the routers' own. balanced: the tokens that experts are balanced over.
        chunks: what linear attention in plain PyTorch makes of the sequences' bounds, in its first layer
            (`services.trainer.megatron.linear_attention.ChunkedSequences`).
        starts: of the sequences, and T, on the host. choices: number of a layer with an indexer, from 1 → int32 [T, keys], the places of
            the keys that a token attends to in its sequence.
    """

    groups: list[LengthGroup] = field(default_factory=list)
    restore: Tensor | None = None
    context: ContextSplit | None = None
    long: LongSequences | None = None
    shared: SharedKeys | None = None
    routing: StageRouting | None = None
    balanced: BalancedTokens | None = None
    chunks: Any = None
    starts: tuple[int, ...] = ()
    choices: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class ModelInput:
    """The input of one forward pass.

    Args:
        tokens: int64 [1, U], this rank's: the pack's T, or those of them that are computed, and padding.
        positions: int64 [1, U], place within the sequence.
        sequences: their starts and ends. labels: int64 [U].
        padding: tokens at the end that were added only to make T divisible.
        back: int64 [T], for each token of the pack its index among the computed ones; None where those are all.
        computed: int64 [U - padding], the positions in the pack of the computed ones; None where those are all.
        kept: the tokens that this rank's labels were sampled from, on the host; None where log-probs are over the whole vocabulary.
    """

    tokens: Tensor
    positions: Tensor
    sequences: PackedSequences
    labels: Tensor
    padding: int
    back: Tensor | None = None
    computed: Tensor | None = None
    kept: Kept | None = None

    def own(self, per_token: Tensor, fill: int) -> Tensor:
        """Returns this rank's [U, ...] of the pack's [T, ...], ``fill`` in the padding."""
        if self.sequences.context is not None:
            rows = self.sequences.context.rows
            real = (rows >= 0).view(-1, *[1] * (per_token.dim() - 1))
            return torch.where(real, per_token[rows.clamp(min=0)], fill)
        found = per_token if self.computed is None else per_token.index_select(0, self.computed)
        return torch.cat([found, found.new_full((self.padding, *found.shape[1:]), fill)]) if self.padding else found

    def whole(self, per_token: Tensor) -> Tensor:
        """Returns the pack's [T, ...] of this rank's [U, ...]; see :meth:`ContextSplit.whole`."""
        if self.sequences.context is not None:
            return self.sequences.context.whole(per_token)
        if self.back is not None:
            return per_token.index_select(0, self.back)
        return per_token[: per_token.size(0) - self.padding]


def model_input(
    batch: PackedBatch,
    layout: ParallelLayout,
    dense: bool,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    least_saved: float | None = None,
) -> ModelInput:
    """Prepares a micro-batch for the model.

    Args:
        batch: on any device; on the host, nothing here waits for a GPU. device: where the result goes.
        layout: sequence parallelism needs a T that the tensor-parallel ranks divide, context parallelism pads every
            sequence; other layouts take the pack as it is. dense: whether to prepare the dense batches.
        group: the context-parallel ranks, where there are several. least_saved: as `prefixes_of` takes it; None with such a group.
    """
    total = batch.tokens.numel()
    tensor = layout.tensor if layout.sequence_parallel else 1
    starts = batch.cu_seqlens.tolist()
    if group is not None and group.size() > 1:
        return _context_input(batch, starts, tensor, device, group)
    if (shared := prefixes_of(batch, least_saved)) is not None:
        return _sharing_input(batch, starts, shared, tensor, dense, device)
    padding = round_up(total, tensor) - total
    starts += [total + padding] if padding else []
    tokens, labels = (torch.nn.functional.pad(t, (0, padding)).to(device, non_blocking=True) for t in (batch.tokens, batch.labels))
    bounds = torch.tensor(starts)
    places = torch.arange(total + padding) - torch.repeat_interleave(bounds[:-1], bounds.diff())
    positions = places.to(device, non_blocking=True)
    groups, restore = length_groups(starts, device) if dense else ([], None)
    long = None if dense else long_sequences(starts, device)
    sequences = _sequences(starts, max(batch.max_seqlen, padding), positions, groups=groups, restore=restore, long=long)
    return ModelInput(tokens[None], positions[None], sequences, labels, padding)


def _sharing_input(
    batch: PackedBatch, starts: list[int], found: SharedPrefixes, tensor: int, dense: bool, device: torch.device
) -> ModelInput:
    count, total = len(found.computed), starts[-1]
    padding = round_up(count, tensor) - count
    longest = max(batch.max_seqlen, padding)
    computed, back = torch.from_numpy(found.computed), torch.from_numpy(found.back)
    tokens, labels = (torch.nn.functional.pad(t[computed], (0, padding)).to(device) for t in (batch.tokens, batch.labels))
    bounds = torch.tensor(starts)
    places = (torch.arange(total) - torch.repeat_interleave(bounds[:-1], bounds.diff()))[computed]
    shared = found.shared.tolist()
    if padding:  # a sequence of its own
        starts, shared = [*starts, total + padding], [*shared, 0]
        places, back = torch.cat([places, torch.arange(padding)]), torch.cat([back, count + torch.arange(padding)])
    lengths = torch.tensor(starts).diff()
    queries = lengths - torch.tensor(shared)
    keys = SharedKeys(
        rows=back.to(device),
        cu_queries=torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int().to(device),
        cu_keys=torch.tensor(starts, dtype=torch.int32).to(device),
        longest_queries=int(queries.max()),
        longest_keys=int(lengths.max()),
    )
    groups, restore = length_groups(starts, device, shared, back) if dense else ([], None)
    positions = places.to(device)
    sequences = _sequences([0, count + padding], longest, positions, groups=groups, restore=restore, shared=keys)
    whole = back[:total].to(device)
    return ModelInput(tokens[None], positions[None], sequences, labels, padding, whole, computed.to(device))


def _context_input(batch: PackedBatch, starts: list[int], tensor: int, device: torch.device, group: dist.ProcessGroup) -> ModelInput:
    padded = padded_starts(starts, group.size(), tensor)
    part = split(starts, padded, group, group.rank(), device)
    bounds = torch.tensor(starts)
    places = torch.arange(starts[-1]) - torch.repeat_interleave(bounds[:-1], bounds.diff())
    tokens, labels, positions = (part.own(t.to(device)) for t in (batch.tokens, batch.labels, places))
    longest = max(stop - start for start, stop in pairwise(padded))
    sequences = _sequences(padded, longest, positions, context=part)
    return ModelInput(tokens[None], positions[None], sequences, labels, 0)


def _sequences(starts: list[int], longest: int, places: Tensor, **more: Any) -> PackedSequences:
    cu_seqlens = torch.tensor(starts, dtype=torch.int32).to(places.device, non_blocking=True)
    cu_seqlens.places = places  # type: ignore[attr-defined]  # for `_rotated`
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        starts=tuple(starts),
        **more,
    )


def _rotated(states: Tensor, cu_seqlens: Tensor, table: Tensor, *options: Any, cp_group: Any, **more: Any) -> Tensor:
    """Rotates [T, heads, width] by each token's place, in the place of Megatron's function: that counts from each sequence's start, also
    where beginnings are shared, and waits twice for the GPU in each call.

    Args:
        table: frequencies [places, 1, 1, width]. options, more: of Megatron's function for sequences of one length.
    """
    known, own = getattr(cu_seqlens, "rotation", (None, None))
    if known is not table:
        own = table.index_select(0, cu_seqlens.places)  # type: ignore[attr-defined]
        cu_seqlens.rotation = table, own  # type: ignore[attr-defined]
    rotated: Tensor = rope_utils._apply_rotary_pos_emb_bshd(states.unsqueeze(1), own, *options, **more).squeeze(1)
    return rotated


rope_utils._apply_rotary_pos_emb_thd = _rotated


def length_groups(
    starts: list[int], device: torch.device, shared: Sequence[int] | None = None, back: Tensor | None = None
) -> tuple[list[LengthGroup], Tensor | None]:
    """Makes dense batches of similar lengths for sequences that begin at ``starts``, whose last entry is T.

    Args:
        shared, back: as in `SharedPrefixes`, where beginnings are shared; sequences with a shared one are batched apart.

    Returns:
        The batches, longest first, and the order that brings their outputs back (see :class:`PackedSequences`).
    """
    lengths = np.diff(starts)
    prefixes = np.zeros_like(lengths) if shared is None else np.array(shared)
    queries = lengths - prefixes
    firsts = np.cumsum(queries) - queries
    sizes = list(zip((prefixes > 0).tolist(), queries.tolist(), lengths.tolist(), strict=True))
    batches: list[list[int]] = []
    for index in sorted(np.flatnonzero(queries).tolist(), key=lambda i: (sizes[i][0], -sizes[i][1], -sizes[i][2])):
        if not batches or not _alike(sizes[batches[-1][0]], sizes[index]):
            batches.append([])
        batches[-1].append(index)
    groups: list[LengthGroup] = []
    restore = torch.empty(int(queries.sum()), dtype=torch.int64)
    offset = 0
    for batch in batches:
        steps = torch.arange(int(queries[batch[0]]))
        first, own, prefix = (torch.from_numpy(values[batch])[:, None] for values in (firsts, queries, prefixes))
        real = steps < own
        rows = torch.where(real, first + steps, first).reshape(-1)
        restore[rows[real.reshape(-1)]] = offset + torch.nonzero(real.reshape(-1)).squeeze(1)
        offset += rows.numel()
        group = LengthGroup(rows.to(device), len(steps), len(batch), rows.to(device))
        if back is not None and prefix.any():
            beginning = torch.tensor([starts[index] for index in batch])[:, None]
            places = torch.arange(int(lengths[batch].max()))
            group.keys = back[torch.where(places < prefix + own, beginning + places, beginning)].reshape(-1).to(device)
            group.seen = _seen(prefix, len(steps), len(places)).to(device)
        groups.append(group)
    if len(groups) == 1 and offset == len(restore) and torch.equal(restore, torch.arange(offset)):
        return groups, None
    return groups, restore.to(device)


def _alike(first: tuple[bool, int, int], other: tuple[bool, int, int]) -> bool:
    """Returns whether two sequences can be rows of one batch: (whether they share a beginning, queries, keys) of each."""
    pairs = [sorted(sizes) for sizes in zip(first[1:], other[1:], strict=True)]
    return first[0] == other[0] and all(more <= SHORT or less >= SIMILAR * more for less, more in pairs)


def _seen(prefix: Tensor, queries: int, keys: int) -> Tensor:
    """Returns which keys each query sees, bool [n or 1, 1, queries, keys]: ``prefix``, int64 [n, 1], and its own up to itself."""
    if (prefix == prefix[0]).all():
        prefix = prefix[:1]
    return (torch.arange(keys) <= prefix[..., None] + torch.arange(queries)[:, None])[:, None]
