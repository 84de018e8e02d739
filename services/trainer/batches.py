"""A batch as one rank trains it: the samples of its shard in packed micro-batches, with the fields of each token.

``assemble`` lays the shard out with its loss weights; fields that the model, the critic or the objective gives come one by one, by
``with_field`` and ``with_values``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from services.trainer.batch_metrics import StatColumn, Table, metrics_of_batch
from services.trainer.objective.reduce import denominator, passing, sample_weights
from services.trainer.packing import NO_VERSION, PARTIAL, BadSample, PackedBatch, collect, pack, spread
from services.trainer.partition import Partition, Placement
from services.trainer.placement import balance
from services.trainer.shard_reader import Shard
from services.trainer.teacher_fields import top_k_fields
from shared.config.algorithm import AlgorithmSection
from shared.runtime.errors import MyxoError
from shared.schema.sample import NO_LIMIT, ExpertChoices, Sample

TEACHER = "teacher_log_probs"


class BadBatch(MyxoError):
    """A batch that cannot be trained on as a whole, though each of its samples may be fine."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: the packed samples, in order. ``indices``: the samples' indices in the partition."""

    indices: list[int]
    samples: list[Sample]
    packed: PackedBatch


@dataclass(frozen=True)
class TrainBatch:
    """One rank's part of a training step, split into optimizer steps; every rank has as many of them, of as many micro-batches.

    ``sample_stats`` are the whole batch's. ``denominators``: for each optimizer step, the divisor of sums over samples. ``rewards``,
    ``raw``: as in `Shard`.
    """

    partition: Partition
    sample_stats: Table
    steps: list[list[MicroBatch]]
    denominators: tuple[float, ...] = ()
    rewards: list[float] | None = None
    raw: list[float] | None = None

    @property
    def step(self) -> int:
        return self.partition.batch.step

    @property
    def version(self) -> int:
        return self.partition.batch.version

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the whole batch before it is trained."""
        return metrics_of_batch(self.partition.batch, self.sample_stats)

    @property
    def indices(self) -> list[int]:
        """Returns the indices of this rank's samples, ascending."""
        return sorted(index for micro_batch in self.micro_batches for index in micro_batch.indices)

    @property
    def names(self) -> list[str]:
        """Returns their names, in the same order."""
        return [self.partition.name(index) for index in self.indices]

    @property
    def packed(self) -> list[PackedBatch]:
        """Returns the micro-batches of all optimizer steps, in order."""
        return [micro_batch.packed for micro_batch in self.micro_batches]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Returns those of all optimizer steps, in order."""
        return [micro_batch for step in self.steps for micro_batch in step]

    def per_sample(self, field: str) -> dict[int, Tensor]:
        """Returns a field of the micro-batches sample by sample: views [R] of the packed tensors."""
        found: dict[int, Tensor] = {}
        for item in self.micro_batches:
            found.update(zip(item.indices, collect(item.samples, item.packed.fields[field]), strict=True))
        return found

    def named(self, field: str) -> dict[str, Tensor]:
        """Returns the same by the samples' names."""
        return {self.partition.name(index): values for index, values in self.per_sample(field).items()}

    def masks(self) -> dict[int, Tensor]:
        """Returns the masks that this rank's samples are trained by: bool [R]."""
        pairs = (pair for item in self.micro_batches for pair in zip(item.indices, item.samples, strict=True))
        return {index: torch.from_numpy(sample.mask != 0) for index, sample in pairs}

    def with_field(self, name: str, values: Callable[[PackedBatch], Tensor]) -> "TrainBatch":
        """Returns the same batch with one more field; ``values`` gives that of a micro-batch, a tensor [T]."""
        return self._with(name, lambda item: values(item.packed))

    def with_computed(self, name: str, compute: Callable[[Sequence[PackedBatch]], list[Tensor]]) -> "TrainBatch":
        """Returns the same batch with a field that the model computes from all micro-batches at once: a tensor [T] for each."""
        tensors = iter(compute(self.packed))
        return self._with(name, lambda _: next(tensors).cpu())

    def with_routing(self, recorded: Sequence[Mapping[int, Tensor]]) -> "TrainBatch":
        """Returns the same batch, each of whose micro-batches goes through the experts that a pass has recorded, in order."""
        found = iter(recorded)
        steps = [[replace(item, packed=replace(item.packed, routing=next(found))) for item in step] for step in self.steps]
        return replace(self, steps=steps)

    def with_values(self, name: str, values: Sequence[Tensor]) -> "TrainBatch":
        """Returns the same batch with values of its response tokens, [R] of each of ``indices``, as one more field. Raises BadSample."""
        by_index = dict(zip(self.indices, values, strict=True))
        return self._with(name, lambda item: spread(item.samples, [by_index[index] for index in item.indices], name))

    def with_masks(self, masks: Sequence[Tensor]) -> "TrainBatch":
        """Returns the same batch with fewer trained tokens; weights stay those of all.

        Args:
            masks: bool [R] of each of ``indices``, 0 where a token is not trained, or not any more.
        """
        by_index = dict(zip(self.indices, masks, strict=True))
        steps = [[_masked(item, [by_index[index] for index in item.indices]) for item in step] for step in self.steps]
        return replace(self, steps=steps)

    def _with(self, name: str, values: Callable[[MicroBatch], Tensor]) -> "TrainBatch":
        steps = [[replace(item, packed=item.packed.with_fields(**{name: values(item)})) for item in step] for step in self.steps]
        return replace(self, steps=steps)


def assemble(shard: Shard, stats: Table, objective: AlgorithmSection, *, rank: int, choices: ExpertChoices | None = None) -> TrainBatch:
    """Lays a shard out, each token weighted so that sums over micro-batches and ranks are the batch's means.

    Optimizer steps of which no rank trains a token are left out. Samples that do not pass (`passing`) have weight 0.

    Args:
        stats: of the whole batch. rank: this data-parallel rank. choices: as `pack` takes them.

    Raises:
        BadSample: a sample that cannot be trained on. BadBatch: no token of the batch is trained.
    """
    partition, steps, denominators = shard.partition, [], []
    partial = bool(stats[:, StatColumn.UNDRAWN].any())
    for placement in partition.steps:
        weighed = _step_weights(placement, partition, stats, objective)
        if weighed is not None:
            weights, divisor = weighed
            steps.append([_micro_batch(indices, shard, weights, objective, choices, partial=partial) for indices in placement[rank]])
            denominators.append(divisor)
    if not steps:
        raise BadBatch(f"the loss mask is 0 on every token of step {partition.batch.step} ({len(partition.items)} samples)")
    return TrainBatch(partition, stats, steps, tuple(denominators), shard.rewards, shard.raw)


def demonstration_micro_batches(
    samples: Sequence[Sample], objective: AlgorithmSection, *, dp_rank: int, dp_size: int, max_tokens: int, alone: bool = False
) -> list[PackedBatch]:
    """Returns this rank's micro-batches of demonstrations, which every rank holds; a group weighs as one. Raises SampleTooLong.

    ``alone``: a demonstration of more than ``max_tokens`` tokens is a micro-batch by itself.
    """
    most = max_tokens if alone else NO_LIMIT
    trained = [int(np.count_nonzero(sample.mask)) for sample in samples]
    weights = sample_weights(trained, [sample.group for sample in samples], objective.reducer, objective.loss_divisor).tolist()
    placement = balance([min(sample.length, most) for sample in samples], dp_size, max_tokens)
    return [pack([samples[index] for index in indices], [weights[index] for index in indices]) for indices in placement[dp_rank]]


def rollouts_of(partition: Partition, stats: Table) -> list[tuple[int, int]]:
    """Returns each sample's rollout, unique over the whole batch: (its group's index, its index in the group)."""
    return [(item.group, int(rollout)) for item, rollout in zip(partition.items, stats[:, StatColumn.ROLLOUT], strict=True)]


def baselines_of(partition: Partition, stats: Table) -> list[tuple[int, float]]:
    """Returns what each sample's reward is compared with, unique over the whole batch: its group and its role in it."""
    return [(item.group, role) for item, role in zip(partition.items, stats[:, StatColumn.ROLE].tolist(), strict=True)]


def _step_weights(
    placement: Placement, partition: Partition, stats: Table, objective: AlgorithmSection
) -> tuple[dict[int, float], float] | None:
    """Returns the weights of an optimizer step's samples and the divisor of sums over them; None where no token of the step is trained."""
    counts: list[int] = stats[:, StatColumn.TRAINED].astype(int).tolist()
    members = sorted(index for ranks in placement for micro_batch in ranks for index in micro_batch)
    if not any(counts[index] for index in members):
        return None
    passes, rollouts = passing(objective, partition.rewards), rollouts_of(partition, stats)
    passed = [index for index in members if passes[index]]
    names, trained = [rollouts[index] for index in passed], [counts[index] for index in passed]
    found = sample_weights(trained, names, objective.reducer, objective.loss_divisor).tolist()
    weights = dict.fromkeys(members, 0.0) | dict(zip(passed, found, strict=True))
    return weights, denominator(trained, names, objective.reducer)


def _micro_batch(
    indices: list[int],
    shard: Shard,
    weights: Mapping[int, float],
    objective: AlgorithmSection,
    choices: ExpertChoices | None,
    *,
    partial: bool,
) -> MicroBatch:
    """``partial``: samples of the batch, of whichever rank, lack the rollout's log-probs: nobody shall read them who does not know."""
    samples = [shard.samples[index] for index in indices]
    packed = pack(samples, [weights[index] for index in indices], choices)
    if partial:
        packed = packed.with_renamed("rollout_log_probs", PARTIAL)
    if objective.use_opd and objective.opd_type == "sglang":
        packed = packed.with_fields(**{TEACHER: spread(samples, [_teacher_log_probs(sample) for sample in samples], TEACHER)})
    if objective.opd_top_k:
        packed = packed.with_fields(**top_k_fields(samples, objective.opd_top_k))
    return MicroBatch(indices, samples, packed)


def _masked(item: MicroBatch, masks: Sequence[Tensor]) -> MicroBatch:
    samples = [replace(sample, mask=sample.mask & mask.numpy()) for sample, mask in zip(item.samples, masks, strict=True)]
    kept = spread(item.samples, [mask.float() for mask in masks], "loss_masks")
    columns = {name: kept > 0 if values.dim() == 1 else (kept > 0)[:, None] for name, values in item.packed.fields.items()}
    fields = {name: values.where(columns[name], NO_VERSION if name == "versions" else 0) for name, values in item.packed.fields.items()}
    return MicroBatch(item.indices, samples, replace(item.packed, loss_mask=item.packed.loss_mask * kept, fields=fields))


def _teacher_log_probs(sample: Sample) -> Tensor:
    """Returns the teacher's log-probs of the response, [R]: what whoever generates put into the sample's metadata, or else into its
    ``teacher_log_probs``, as the servers of `algorithm.opd_teachers` do. Raises BadSample."""
    try:
        found = sample.metadata[TEACHER] if TEACHER in sample.metadata else sample.attributes[TEACHER]
        return torch.tensor(np.array(found, np.float64))
    except (KeyError, TypeError, ValueError):
        problem = (
            f"the sample has no {TEACHER}, one number a response token; with opd_type = sglang the servers of opd_teachers give them, "
            "or whoever generates puts them there"
        )
        raise BadSample(sample.name, TEACHER, problem) from None
