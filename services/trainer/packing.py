"""Samples laid end to end: what one forward and backward pass takes. ``placement.py`` decides which go together.

Token ``t`` of a packed sequence predicts token ``t + 1``: all per-token tensors are aligned to what is *predicted*, so
the values of a response's first token sit on the prompt's last position. A sequence's last position predicts nothing.
Values of tokens that are not trained do not get in: a field is blank wherever the mask is 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.trainer.placement import BadBatch, SampleTooLong, balance
from shared.runtime.errors import MyxoError

__all__ = [
    "NO_VERSION",
    "BadBatch",
    "BadSample",
    "PackedBatch",
    "SampleTooLong",
    "TrainSample",
    "balance",
    "check_batch",
    "pack",
    "rank_micro_batches",
]

NO_VERSION = -1
"""Weight version of a position that no rollout generated: prompt, environment's tokens, filler."""

_FILLER_TOKENS = 2


class BadSample(MyxoError):
    """A sample that cannot be trained on.

    Args:
        sample: its name, ``group/rollout_id``. field: the offending field. problem: what is wrong, with the numbers.
    """

    def __init__(self, sample: str, field: str, problem: str) -> None:
        self.sample, self.field, self.problem = sample, field, problem
        super().__init__(f"sample {sample}: {field}: {problem}")


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One trajectory as the trainer takes it. P prompt tokens, R response tokens; checked when it is made.

    Args:
        prompt_tokens: integers [P], P >= 1 (the first response token needs a predecessor).
        response_tokens: integers [R], R >= 0; those of tools and environments are among them, with mask 0.
        loss_mask: integers [R], 1 where the token is trained, else 0.
        rollout_log_probs: floats [R], the engine's log-probs of exactly these tokens. What stands at mask 0 is ignored.
        versions: integers [R], weight version that made each token. What stands at mask 0 is ignored.
        advantage: one float, or floats [R].
        group: id of the prompt's group. rollout_id: id of the rollout; samples that fan out of one rollout share it.

    Raises:
        BadSample: a length that differs from R, a mask value other than 0 and 1, a negative token, or, at mask 1, a
            log-prob or an advantage that is not finite or a negative version.
    """

    prompt_tokens: npt.NDArray[np.int32]
    response_tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    rollout_log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    advantage: float | npt.NDArray[np.floating]
    group: str
    rollout_id: Hashable

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "response_tokens"):
            tokens = self._integers(field)
            if tokens.size and int(tokens.min()) < 0:
                at = int(np.argmax(tokens < 0))
                raise BadSample(self.name, field, f"token {int(tokens[at])} at position {at} is negative")
        if self.prompt_tokens.size == 0:
            raise BadSample(self.name, "prompt_tokens", "is empty; the first response token needs a predecessor")
        mask = self._integers("loss_mask")
        bad = np.flatnonzero((mask != 0) & (mask != 1))
        if bad.size:
            raise BadSample(self.name, "loss_mask", f"is {int(mask[bad[0]])} at position {bad[0]}, expected 0 or 1")
        self._trained_finite("rollout_log_probs", self.rollout_log_probs)
        versions = self._integers("versions")
        bad = np.flatnonzero((mask != 0) & (versions < 0))
        if bad.size:
            raise BadSample(self.name, "versions", f"is {int(versions[bad[0]])} at trained position {bad[0]}, expected >= 0")
        if np.ndim(self.advantage):
            self._trained_finite("advantage", self.advantage)
        elif not np.isfinite(self.advantage):
            raise BadSample(self.name, "advantage", f"is {self.advantage}, expected a finite number")

    def _integers(self, field: str) -> npt.NDArray[np.integer]:
        array: npt.NDArray[np.integer] = getattr(self, field)
        if not isinstance(array, np.ndarray):
            raise BadSample(self.name, field, f"is a {type(array).__name__}, expected a numpy array of integers")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise BadSample(self.name, field, f"has dtype {array.dtype} and shape {array.shape}, expected integers [R]")
        if field != "prompt_tokens" and array.size != np.size(self.response_tokens):
            raise BadSample(self.name, field, f"has {array.size} values for {np.size(self.response_tokens)} response tokens")
        return array

    def _trained_finite(self, field: str, values: object) -> None:
        if not isinstance(values, np.ndarray):
            raise BadSample(self.name, field, f"is a {type(values).__name__}, expected a numpy array of floats")
        array = values
        if array.ndim != 1 or array.dtype.kind != "f":
            raise BadSample(self.name, field, f"has dtype {array.dtype} and shape {array.shape}, expected floats [R]")
        if array.size != np.size(self.response_tokens):
            raise BadSample(self.name, field, f"has {array.size} values for {np.size(self.response_tokens)} response tokens")
        bad = np.flatnonzero((np.asarray(self.loss_mask) != 0) & ~np.isfinite(array))
        if bad.size:
            at = f"{array[bad[0]]} at trained position {bad[0]}"
            raise BadSample(self.name, field, f"is {at} ({bad.size} such positions), expected finite values")

    @property
    def name(self) -> str:
        """What errors call this sample: ``group/rollout_id``."""
        return f"{self.group}/{self.rollout_id}"

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return int(np.size(self.prompt_tokens) + np.size(self.response_tokens))

    def predicting(self, start: int) -> slice:
        """The positions that predict the response's tokens, in a pack in which the sample begins at ``start``."""
        return slice(start + self.prompt_tokens.size - 1, start + self.length - 1)

    @property
    def trained_tokens(self) -> int:
        """Tokens with mask 1."""
        return int(np.count_nonzero(self.loss_mask))


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
            gives ``advantages``, ``rollout_log_probs`` (float32), ``versions`` (int32) and, with weights, ``weights``
            (float32).
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    fields: dict[str, Tensor]

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same micro-batch with every tensor on ``device``."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            labels=self.labels.to(device),
            loss_mask=self.loss_mask.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            fields={name: tensor.to(device) for name, tensor in self.fields.items()},
        )

    def with_fields(self, **tensors: Tensor) -> PackedBatch:
        """The same micro-batch with more per-token tensors [T], for example ``proximal_log_probs``.

        Raises:
            BadBatch: a tensor whose shape is not [T].
        """
        for name, tensor in tensors.items():
            if tensor.shape != self.tokens.shape:
                raise BadBatch(f"field {name} has shape {tuple(tensor.shape)}, expected {tuple(self.tokens.shape)}")
        return replace(self, fields={**self.fields, **tensors})


def check_batch(samples: Sequence[TrainSample], max_tokens: int, vocab_size: int | None = None) -> None:
    """Refuse what no placement of the samples could train.

    Raises:
        BadBatch: no samples, or none of their tokens is trained. SampleTooLong: one is longer than ``max_tokens``.
        BadSample: a token outside ``vocab_size``.
    """
    if not samples:
        raise BadBatch("the batch holds no samples")
    for sample in samples:
        _check_sample(sample, max_tokens, vocab_size)
    if not any(sample.trained_tokens for sample in samples):
        tokens = sum(sample.length for sample in samples)
        raise BadBatch(f"the loss mask is 0 on every token of the batch ({len(samples)} samples, {tokens} tokens)")


def _check_sample(sample: TrainSample, max_tokens: int, vocab_size: int | None) -> None:
    if sample.length > max_tokens:
        raise SampleTooLong(sample.name, sample.length, max_tokens)
    if vocab_size is None:
        return
    for field in ("prompt_tokens", "response_tokens"):
        bad = np.flatnonzero(getattr(sample, field) >= vocab_size)
        if bad.size:
            token = int(getattr(sample, field)[bad[0]])
            problem = f"token {token} at position {bad[0]} is outside the vocabulary of {vocab_size}"
            raise BadSample(sample.name, field, problem)


def pack(
    samples: Sequence[TrainSample],
    max_tokens: int,
    *,
    weights: Sequence[float] | npt.NDArray[np.floating] | None = None,
    vocab_size: int | None = None,
) -> PackedBatch:
    """Lay samples end to end as one micro-batch; without samples, a filler that trains nothing and has the same fields.

    Args:
        max_tokens: tokens that the micro-batch may hold.
        weights: one float per sample, from ``objective.reduce`` over the whole batch; becomes field ``weights``, the
            sample's weight at each of its trained tokens.
        vocab_size: if given, tokens outside ``[0, vocab_size)`` are refused.

    Raises:
        SampleTooLong, BadSample: as ``check_batch``. BadBatch: over ``max_tokens`` together, or not one weight each.
    """
    if weights is not None and len(weights) != len(samples):
        raise BadBatch(f"{len(weights)} weights for {len(samples)} samples")
    for sample in samples:
        _check_sample(sample, max_tokens, vocab_size)
    lengths = [sample.length for sample in samples] or [_FILLER_TOKENS]
    total = sum(lengths)
    if samples and total > max_tokens:
        raise BadBatch(f"{len(samples)} samples have {total} tokens together, a micro-batch holds at most {max_tokens}")

    tokens, labels = np.zeros(total, np.int64), np.zeros(total, np.int64)
    mask = np.zeros(total, np.float32)
    fields: dict[str, npt.NDArray[np.generic]] = {
        "advantages": np.zeros(total, np.float32),
        "rollout_log_probs": np.zeros(total, np.float32),
        "versions": np.full(total, NO_VERSION, np.int32),
    }
    if weights is not None:
        fields["weights"] = np.zeros(total, np.float32)

    start = 0
    for index, sample in enumerate(samples):
        end = start + sample.length
        tokens[start:end] = np.concatenate([sample.prompt_tokens, sample.response_tokens])
        labels[start : end - 1] = tokens[start + 1 : end]
        predicts = sample.predicting(start)
        trained = np.asarray(sample.loss_mask) != 0
        mask[predicts] = trained
        fields["advantages"][predicts] = np.where(trained, sample.advantage, 0.0)
        fields["rollout_log_probs"][predicts] = np.where(trained, sample.rollout_log_probs, 0.0)
        fields["versions"][predicts] = np.where(trained, sample.versions, NO_VERSION)
        if weights is not None:
            fields["weights"][predicts] = np.where(trained, weights[index], 0.0)
        start = end

    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(mask),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        max_seqlen=max(lengths),
        fields={name: torch.from_numpy(array) for name, array in fields.items()},
    )


def spread(samples: Sequence[TrainSample], values: Sequence[npt.NDArray[np.floating]]) -> Tensor:
    """Numbers of response tokens where their micro-batch has them: float32 [T], 0 wherever the mask is 0.

    Args:
        samples: those that ``pack`` laid out. values: [R] for each.

    Raises:
        BadSample: not R numbers, or one of a trained token is not finite.
    """
    laid_out = np.zeros(sum(sample.length for sample in samples) or _FILLER_TOKENS, np.float32)
    start = 0
    for sample, numbers in zip(samples, values, strict=True):
        trained = np.asarray(sample.loss_mask) != 0
        if np.shape(numbers) != trained.shape:
            raise BadSample(sample.name, "values", f"shape {np.shape(numbers)} for {trained.size} response tokens")
        bad = np.flatnonzero(trained & ~np.isfinite(numbers))
        if bad.size:
            raise BadSample(sample.name, "values", f"{numbers[bad[0]]} at trained position {bad[0]}, expected finite numbers")
        laid_out[sample.predicting(start)] = np.where(trained, numbers, 0.0)
        start += sample.length
    return torch.from_numpy(laid_out)


def collect(samples: Sequence[TrainSample], packed: Tensor) -> list[npt.NDArray[np.float32]]:
    """The response tokens' numbers out of a micro-batch's [T]: float32 [R] for each of the samples that ``pack`` laid out."""
    numbers, found, start = packed.detach().float().cpu().numpy(), [], 0
    for sample in samples:
        found.append(numbers[sample.predicting(start)].copy())
        start += sample.length
    return found


def rank_micro_batches(
    samples: Sequence[TrainSample],
    weights: Sequence[float] | npt.NDArray[np.floating],
    *,
    dp_rank: int,
    dp_size: int,
    max_tokens: int,
    vocab_size: int | None = None,
) -> list[PackedBatch]:
    """The micro-batches of one data-parallel rank, from the whole batch of one optimizer step, which every rank holds.

    Args:
        samples: the whole batch, in the same order on every rank.
        weights: one float per sample of the whole batch, from ``objective.reduce``.
        max_tokens: tokens a micro-batch may hold (``max_tokens_per_gpu`` times the context parallel size).

    Raises:
        As ``check_batch``; BadBatch when ``dp_rank`` is not in ``[0, dp_size)`` or there is not one weight per sample.
    """
    if not 0 <= dp_rank < dp_size:
        raise BadBatch(f"dp_rank {dp_rank} is not in [0, {dp_size})")
    if len(weights) != len(samples):
        raise BadBatch(f"{len(weights)} weights for {len(samples)} samples")
    check_batch(samples, max_tokens, vocab_size)
    placement = balance([sample.length for sample in samples], dp_size, max_tokens)
    return [pack([samples[i] for i in indexes], max_tokens, weights=[float(weights[i]) for i in indexes]) for indexes in placement[dp_rank]]
