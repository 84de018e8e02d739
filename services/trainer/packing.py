"""Packs of samples laid end to end, one for each forward and backward pass, and the beginnings that their sequences have in common.

`services.trainer.partition` decides which samples go together. Token ``t`` of a packed sequence predicts token ``t + 1``: all per-token
tensors are aligned to what is *predicted*, so the values of a response's first token sit on the prompt's last position. A sequence's last
position predicts nothing. Values of tokens that are not trained are left out: a field is 0 wherever the mask is 0.

Under causal attention the hidden states of a token depend on the tokens up to it and on no others, so sequences that begin alike have the
same states there: samples of one prompt, forks of one session, conversations under one system prompt. A token is shared if the token after
it is shared, too; then what predicts it is the same as well, and log-probs of the computed tokens are those of all. So each sequence
computes at least its last token, and each fork the last token before it. It is exact: what the copies would have computed twice is computed
once and read by all of them, and the gradient that flows into it is the sum of theirs.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.runtime.errors import MyxoError
from shared.schema.kept_tokens import Kept
from shared.schema.sample import ExpertChoices, Sample

NO_VERSION = -1  # weight version of a position that no rollout generated: prompt, environment's tokens, filler
# The rollout's log-prob of a trained token whose function has not kept it. Whatever is computed with it is not finite
UNKNOWN = float("nan")
PARTIAL = "partial_rollout_log_probs"  # the field that takes the place of ``rollout_log_probs`` in a batch with `UNKNOWN` ones
_FILLER_TOKENS = 2


class BadSample(MyxoError):
    """A sample that cannot be trained on.

    Args:
        sample: its name. field: the offending field. problem: what is wrong, with the numbers.
    """

    def __init__(self, sample: str, field: str, problem: str) -> None:
        self.sample, self.field, self.problem = sample, field, problem
        super().__init__(f"sample {sample}: {field}: {problem}")


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch: S sequences end to end, T tokens in all.

    Args:
        tokens: int64 [T].
        labels: int64 [T], ``labels[t] = tokens[t + 1]`` inside a sequence, 0 at each sequence's last position.
        loss_mask: float32 [T], 1 where ``labels[t]`` is trained.
        cu_seqlens: int32 [S + 1], starts of the sequences, and T.
        max_seqlen: tokens of the longest sequence.
        fields: more per-token tensors [T], aligned to ``labels``; 0 (versions: -1) wherever the mask is 0. ``pack``
            gives ``weights`` and ``rollout_log_probs`` (float32) and ``versions`` (int32).
        experts: int16 [T, layers with experts, experts a token], those that token t goes through; -1: the router's own choice. None: its
            own everywhere.
        num_experts: of a layer, where ``experts`` are given.
        routing: what a pass over this micro-batch has recorded on this rank: number of a layer, from 1 → int16 [tokens of this rank,
            experts a token]. It takes the place of ``experts``.
        pictures: of each sequence, PNGs and WAVs in the order of its tokens; nothing where none shows one.
        kept: the tokens that trained ``labels`` were sampled from, on the host; None: the whole vocabulary everywhere.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    fields: dict[str, Tensor]
    experts: Tensor | None = None
    routing: Mapping[int, Tensor] | None = None
    kept: Kept | None = None
    pictures: tuple[tuple[bytes, ...], ...] = ()
    num_experts: int = 0

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Returns the same micro-batch with every tensor on ``device``, the host's own or a GPU, which the host does not wait for."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("tokens", "labels", "loss_mask", "cu_seqlens")}
        return replace(self, **moved, fields={name: tensor.to(device, non_blocking=True) for name, tensor in self.fields.items()})

    def with_fields(self, **tensors: Tensor) -> "PackedBatch":
        """Returns the same micro-batch with more per-token tensors [T], for example ``proximal_log_probs``."""
        return replace(self, fields={**self.fields, **tensors})

    def with_renamed(self, field: str, name: str) -> "PackedBatch":
        """Returns the same micro-batch with a field under another name."""
        return replace(self, fields={name if own == field else own: tensor for own, tensor in self.fields.items()})


def pack(samples: Sequence[Sample], weights: Sequence[float], choices: ExpertChoices | None = None) -> PackedBatch:
    """Lays samples end to end as one micro-batch; without samples, a filler that trains nothing and has the same fields.

    Args:
        samples: checked ones, whose mask says which tokens are trained.
        weights: of each sample, from ``objective.reduce`` over the whole batch: the weight of each of its trained tokens.
        choices: of the model, where its tokens go through the experts that the samples tell; None: they do not.
    """
    lengths = [sample.length for sample in samples] or [_FILLER_TOKENS]
    total = sum(lengths)
    tokens, labels = np.zeros(total, np.int64), np.zeros(total, np.int64)
    mask = np.zeros(total, np.float32)
    fields: dict[str, npt.NDArray[np.generic]] = {
        "weights": np.zeros(total, np.float32),
        "rollout_log_probs": np.zeros(total, np.float32),
        "versions": np.full(total, NO_VERSION, np.int32),
    }
    for (sample, whole, predicting), weight in zip(_layout(samples), weights, strict=True):
        tokens[whole] = np.concatenate([sample.prompt, sample.response])
        labels[whole.start : whole.stop - 1] = tokens[whole.start + 1 : whole.stop]
        trained = sample.mask != 0
        mask[predicting] = trained
        fields["weights"][predicting] = np.where(trained, weight, 0.0)
        fields["rollout_log_probs"][predicting] = np.where(trained, UNKNOWN if sample.log_probs is None else sample.log_probs, 0.0)
        fields["versions"][predicting] = np.where(trained, sample.versions(), NO_VERSION)
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(mask),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        max_seqlen=max(lengths),
        fields={name: torch.from_numpy(array) for name, array in fields.items()},
        experts=None if choices is None else torch.from_numpy(_experts(samples, total, choices)),
        kept=_kept(samples, total),
        pictures=tuple(sample.pictures for sample in samples) if any(sample.pictures for sample in samples) else (),
        num_experts=0 if choices is None else choices.count,
    )


def _kept(samples: Sequence[Sample], total: int) -> Kept | None:
    """Returns the kept tokens of a pack's places: those of the trained tokens that the places predict. None where no sample has some."""
    if all(sample.kept is None for sample in samples):
        return None
    counts, ids = np.zeros(total, np.int32), list[NDArray[np.int32]]()
    for sample, _, predicting in _layout(samples):
        if sample.kept is not None:
            trained = sample.kept.at(np.where(sample.mask != 0, np.arange(len(sample.response)), -1))
            counts[predicting] = trained.counts
            ids.append(trained.ids)
    return Kept.counted(counts, np.concatenate(ids))


def _experts(samples: Sequence[Sample], total: int, choices: ExpertChoices) -> npt.NDArray[np.int16]:
    """Returns the experts of a pack's tokens, int16 [T, layers, experts a token]; -1 where no trained sample names them."""
    experts = np.full((total, len(choices.layers), choices.per_token), -1, np.int16)
    for sample, whole, _ in _layout(samples):
        if sample.routed_experts is not None and sample.mask.any():  # those of one that is not trained are not checked
            experts[whole.start : whole.stop - 1] = sample.routed_experts
    return experts


def separate(packed: PackedBatch) -> list[PackedBatch]:
    """Returns each of a micro-batch's sequences as a micro-batch of its own: views of its tensors."""
    found = []
    for number, (start, end) in enumerate(itertools.pairwise(packed.cu_seqlens.tolist())):
        per_token = {name: getattr(packed, name)[start:end] for name in ("tokens", "labels", "loss_mask")}
        fields = {name: tensor[start:end] for name, tensor in packed.fields.items()}
        bounds, experts = torch.tensor([0, end - start], dtype=torch.int32), None if packed.experts is None else packed.experts[start:end]
        kept = packed.kept and packed.kept.part(start, end)
        pictures = packed.pictures[number : number + 1]
        found.append(PackedBatch(**per_token, cu_seqlens=bounds, max_seqlen=end - start, fields=fields, experts=experts, kept=kept,
                                 pictures=pictures, num_experts=packed.num_experts))  # fmt: skip
    return found


def spread(samples: Sequence[Sample], values: Sequence[Tensor], field: str) -> Tensor:
    """Lays out per-token values as ``pack`` has laid out their samples: float32 [T], 0 wherever the mask is 0.

    Args:
        values: [R] for each sample. field: what they are, for errors.

    Raises:
        BadSample: the values are not R, or one of a trained token is not finite.
    """
    packed = torch.zeros(sum(sample.length for sample in samples) or _FILLER_TOKENS)
    for (sample, _, predicting), given in zip(_layout(samples), values, strict=True):
        trained = torch.from_numpy(sample.mask != 0)
        if given.shape != trained.shape:
            raise BadSample(sample.name, field, f"shape {tuple(given.shape)} for {trained.numel()} response tokens")
        kept = torch.where(trained, given, 0.0)
        if not torch.isfinite(kept).all():
            position = int(torch.nonzero(~torch.isfinite(kept))[0])
            raise BadSample(sample.name, field, f"{given[position].item()} at trained position {position}, expected finite numbers")
        packed[predicting] = kept.float()
    return packed


def places(samples: Sequence[Sample]) -> tuple[int, list[slice]]:
    """Returns T of the micro-batch that ``pack`` makes of samples, and where each one's response tokens are predicted."""
    return sum(sample.length for sample in samples) or _FILLER_TOKENS, [predicting for _, _, predicting in _layout(samples)]


def collect(samples: Sequence[Sample], packed: Tensor) -> list[Tensor]:
    """Returns the response tokens' values in a micro-batch's [T]: a view [R] for each of the samples that ``pack`` laid out."""
    return [packed[predicting] for _, _, predicting in _layout(samples)]


def _layout(samples: Sequence[Sample]) -> Iterator[tuple[Sample, slice, slice]]:
    """Yields each sample with its positions in a pack, and those of them that predict its response's tokens."""
    start = 0
    for sample in samples:
        end = start + sample.length
        yield sample, slice(start, end), slice(start + len(sample.prompt) - 1, end - 1)
        start = end


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """The tokens of a pack of S sequences that are computed, U of T.

    Args:
        shared: int64 [S], how many of each sequence's first tokens another one computes.
        computed: int64 [U], their positions in the pack, ascending.
        back: int64 [T], for each token of the pack its index in ``computed``.
    """

    shared: NDArray[np.int64]
    computed: NDArray[np.int64]
    back: NDArray[np.int64]

    @property
    def saved(self) -> float:
        """Returns the share of the pack's tokens that is not computed."""
        return 1 - len(self.computed) / max(len(self.back), 1)


def routed_keys(tokens: NDArray[np.int64], experts: NDArray[np.int16]) -> NDArray[np.int64]:
    """Returns numbers that are equal where both the token and its experts are, int64 [T]: `shared_prefixes` takes them for tokens.

    Args:
        experts: int16 [T, layers, experts a token].
    """
    flat = experts.reshape(len(tokens), -1)
    # random odd factors modulo 2^64: two rows that differ have the same sum with a probability of about 2^-63
    factors = np.random.default_rng(0).integers(1, 2**62, flat.shape[1] + 1, np.int64) * 2 + 1
    keys = tokens * factors[0]
    for column, factor in enumerate(factors[1:].tolist()):
        keys += flat[:, column] * np.int64(factor)
    return keys


def shared_prefixes(tokens: NDArray[np.int64], starts: Sequence[int]) -> SharedPrefixes:
    """Finds all that can be shared.

    Args:
        tokens: [T]. starts: of the sequences, and T.
    """
    spans = list(pairwise(starts))
    encoded, width = tokens.tobytes(), tokens.itemsize
    order = sorted(range(len(spans)), key=lambda index: encoded[width * spans[index][0] : width * spans[index][1]])
    shared = np.zeros(len(spans), np.int64)
    # of all sequences before it in this order, none has more in common with a sequence than its neighbour
    for before, after in pairwise(order):
        shared[after] = max(_common(tokens[slice(*spans[before])], tokens[slice(*spans[after])]) - 1, 0)
    lengths = np.diff(starts)
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    own = place >= np.repeat(shared, lengths)
    back = np.cumsum(own) - 1
    for before, after in pairwise(order):
        (source, _), (target, _), count = spans[before], spans[after], shared[after]
        back[target : target + count] = back[source : source + count]
    return SharedPrefixes(shared, np.flatnonzero(own), back)


def _common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length


def prefixes_of(batch: PackedBatch, least: float | None) -> SharedPrefixes | None:
    """Returns the beginnings that a micro-batch's sequences share; None where that would save less than ``least`` of its tokens.

    ``least``: None for not at all (the backend decides it).
    """
    if least is None or len(batch.cu_seqlens) < 3:
        return None
    tokens = batch.tokens.cpu().numpy()
    # what two sequences begin with alike is computed alike only where it goes through the same experts
    alike = tokens if batch.experts is None else routed_keys(tokens, batch.experts.cpu().numpy())
    if (
        batch.kept is not None
    ):  # and read alike only where the next token was sampled from the same ones: a token's key has those of its own
        alike = alike + np.roll(batch.kept.keys(), 1)
    found = shared_prefixes(alike, batch.cu_seqlens.tolist())
    return found if found.saved >= least and found.saved > 0 else None
