"""A batch as one rank trains it: the samples of its share, laid out in micro-batches, with what each token brings along.

In order: ``masks_of``, ``assemble`` (loss weights, figures), fields that the model itself gives (``with_field``), ``with_advantages``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.trainer import sample_stats
from services.trainer.objective import (
    Advantages,
    Moments,
    denominator,
    passing,
    sample_weights,
    token_advantages,
    whitened,
)
from services.trainer.packing import BadBatch, BadSample, PackedBatch, TrainSample, collect, pack, rank_micro_batches, spread
from services.trainer.partition import Partition
from services.trainer.sample_stats import BatchMetrics, SampleStats, StatColumn
from services.trainer.shard_reader import Shard
from shared.config.algorithm import AlgorithmSection
from shared.schema import sample

PerSample = Mapping[int, NDArray[np.floating]]
"""Numbers of response tokens, [R], of this rank's samples by their numbers in the deal."""

TEACHER = "teacher_log_probs"

Masks = Mapping[int, NDArray[np.uint8]]
"""Which response tokens are trained, [R], likewise."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: what is packed, in order. ``numbers``: the samples' in the deal."""

    numbers: list[int]
    samples: list[TrainSample]
    packed: PackedBatch


@dataclass(frozen=True)
class TrainBatch:
    """One rank's share of a training step, split into optimizer steps; every rank has as many of them, of as many micro-batches.

    ``facts`` and ``figures`` are the whole batch's. ``denominators``: of each optimizer step, what sums over samples are divided by.
    """

    deal: Partition
    facts: SampleStats
    figures: BatchMetrics
    steps: list[list[MicroBatch]]
    denominators: tuple[float, ...] = ()

    @property
    def step(self) -> int:
        return self.deal.batch.step

    @property
    def version(self) -> int:
        return self.deal.batch.version

    @property
    def numbers(self) -> list[int]:
        """This rank's samples, ascending."""
        return sorted(number for step in self.steps for micro_batch in step for number in micro_batch.numbers)

    def micro_batches(self) -> list[PackedBatch]:
        """All of them, one optimizer step after another."""
        return [micro_batch.packed for step in self.steps for micro_batch in step]

    def per_sample(self, field: str) -> dict[int, NDArray[np.float32]]:
        """A field of the micro-batches, sample by sample: [R]."""
        found: dict[int, NDArray[np.float32]] = {}
        for step in self.steps:
            for one in step:
                found.update(zip(one.numbers, collect(one.samples, one.packed.fields[field]), strict=True))
        return found

    def named(self, numbers: PerSample) -> dict[str, NDArray[np.floating]]:
        """The same under the samples' names."""
        return {self.deal.name(number): values for number, values in numbers.items()}

    def masks(self) -> Masks:
        """The masks that this rank's samples are trained by."""
        pairs = ((one.numbers, one.samples) for step in self.steps for one in step)
        return {number: sample.loss_mask for numbers, samples in pairs for number, sample in zip(numbers, samples, strict=True)}


def masks_of(share: Shard) -> Masks:
    """The masks that a share's samples are trained by: their own, without tokens of versions below the batch's ``mask_below``; all 0 for a
    sample that a filter removed."""
    below, removed = share.deal.batch.mask_below, share.deal.removed()
    return {number: _mask(one, below, number in removed) for number, one in share.samples.items()}


def assemble(
    share: Shard, masks: Masks, known: SampleStats, objective: AlgorithmSection, *, rank: int, max_tokens: int, vocab_size: int
) -> TrainBatch:
    """Lays a share out, each token weighted so that sums over micro-batches and ranks are the batch's means.

    Optimizer steps of which no rank trains a token are left out. Samples that do not pass (`passing`) have weight 0.

    Args:
        known: of the whole batch. rank: this data-parallel rank.

    Raises:
        BadSample: a sample that cannot be trained on. BadBatch: no token of the batch is trained.
    """
    deal = share.deal
    counts, rollouts = known.integers(StatColumn.TRAINED), known.integers(StatColumn.ROLLOUT)
    passes = passing(objective, [reward for group in deal.batch.groups for reward in group.rewards])
    steps: list[list[MicroBatch]] = []
    denominators: list[float] = []
    for placement in deal.steps:
        members = sorted(number for ranks in placement for micro_batch in ranks for number in micro_batch)
        if not any(counts[number] for number in members):
            continue
        passed = [number for number in members if passes[number]]
        names = [(deal.items[number].group, rollouts[number]) for number in passed]
        trained = [counts[number] for number in passed]
        weights = dict.fromkeys(members, 0.0)
        if passed:
            found = sample_weights(trained, names, objective.reducer, objective.loss_divisor)
            weights |= dict(zip(passed, found.tolist(), strict=True))
        denominators.append(denominator(trained, names, objective.reducer))
        step = []
        for numbers in placement[rank]:
            chosen = [_train_sample(share.samples[number], masks[number]) for number in numbers]
            packed = pack(chosen, max_tokens, weights=[weights[number] for number in numbers], vocab_size=vocab_size)
            if objective.use_opd and objective.opd_type == "sglang":
                packed = packed.with_fields(teacher_log_probs=spread(chosen, [_of_teacher(share.samples[number]) for number in numbers]))
            step.append(MicroBatch(numbers, chosen, packed))
        steps.append(step)
    if not steps:
        raise BadBatch(f"the loss mask is 0 on every token of step {deal.batch.step} ({len(deal.items)} samples)")
    return TrainBatch(deal, known, sample_stats.figures(deal.batch, known), steps, tuple(denominators))


def with_field(batch: TrainBatch, name: str, of: Callable[[MicroBatch], Tensor]) -> TrainBatch:
    """The same batch with one more field; ``of`` gives a micro-batch's, a tensor [T]."""
    steps = [[replace(one, packed=one.packed.with_fields(**{name: of(one)})) for one in step] for step in batch.steps]
    return replace(batch, steps=steps)


def with_numbers(batch: TrainBatch, name: str, numbers: PerSample) -> TrainBatch:
    """The same batch with numbers of its response tokens as one more field. Raises BadSample."""
    return with_field(batch, name, lambda one: spread(one.samples, [numbers[number] for number in one.numbers]))


def with_advantages(
    batch: TrainBatch,
    objective: AlgorithmSection,
    merged: Callable[[Moments], Moments],
    *,
    kl: PerSample | None = None,
    values: PerSample | None = None,
    teacher_gap: PerSample | None = None,
    rewards: Sequence[float] | None = None,
    custom: Callable[[NDArray[np.float64]], Advantages] | None = None,
) -> TrainBatch:
    """The same batch with fields ``advantages`` and, where a critic learns from it, ``values`` and ``returns``.

    A collective where advantages are whitened.

    Args:
        merged: the moments of all data-parallel ranks from this one's. kl, values, teacher_gap, custom: as `token_advantages` takes
            them. rewards: in place of the batch's own.

    Raises: as `token_advantages`.
    """
    own, groups, items = batch.numbers, batch.deal.batch.groups, batch.deal.items
    if rewards is None:
        rewards = [reward for group in groups for reward in group.rewards]
    rollouts = [(item.group, rollout) for item, rollout in zip(items, batch.facts.integers(StatColumn.ROLLOUT), strict=True)]
    masks = batch.masks()
    found = token_advantages(
        objective,
        rewards,
        [groups[item.group].group for item in items],
        rollouts,
        [masks[number] for number in own],
        kl=_listed(kl, own),
        values=_listed(values, own),
        teacher_gap=_listed(teacher_gap, own),
        own=own,
        custom=custom,
    )
    advantages: list[NDArray[np.float64]] = found.advantages
    if objective.normalize_advantages:
        moments = merged(Moments.of(advantages, [masks[number] for number in own]))
        advantages = [whitened(values, masks[number], moments) for number, values in zip(own, advantages, strict=True)]
    batch = with_numbers(batch, "advantages", dict(zip(own, advantages, strict=True)))
    if values is not None and found.returns is not None:
        batch = with_numbers(batch, "values", values)
        batch = with_numbers(batch, "returns", dict(zip(own, found.returns, strict=True)))
    return batch


def micro_batches(
    samples: list[TrainSample], objective: AlgorithmSection, *, dp_rank: int, dp_size: int, max_tokens: int, vocab_size: int
) -> list[PackedBatch]:
    """This rank's micro-batches of samples that every rank holds, as those of the warm start."""
    rollouts = [(one.group, one.rollout_id) for one in samples]
    weights = sample_weights([one.trained_tokens for one in samples], rollouts, objective.reducer, objective.loss_divisor)
    return rank_micro_batches(samples, weights, dp_rank=dp_rank, dp_size=dp_size, max_tokens=max_tokens, vocab_size=vocab_size)


def _mask(one: sample.Sample, mask_below: int, removed: bool) -> NDArray[np.uint8]:
    if removed:
        return np.zeros_like(one.mask)
    return one.mask & (one.versions() >= mask_below) if mask_below else one.mask


def _of_teacher(one: sample.Sample) -> NDArray[np.float64]:
    """The teacher's log-probs of the response, as a generate function left them in the metadata: [R]. Raises BadSample."""
    try:
        return np.asarray(one.metadata[TEACHER], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        problem = f"metadata has no {TEACHER}, one number a response token; with opd_type = sglang whoever generates puts them there"
        raise BadSample(f"{one.group}/{one.rollout}", TEACHER, problem) from None


def _train_sample(one: sample.Sample, mask: NDArray[np.uint8]) -> TrainSample:
    return TrainSample(
        prompt_tokens=one.prompt,
        response_tokens=one.response,
        loss_mask=mask,
        rollout_log_probs=one.log_probs,
        versions=one.versions(),
        advantage=0.0,
        group=one.group,
        rollout_id=one.rollout,
    )


def _listed(numbers: PerSample | None, own: Sequence[int]) -> list[NDArray[np.floating]] | None:
    return None if numbers is None else [numbers[number] for number in own]
