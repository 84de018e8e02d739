"""A batch as one rank trains it: its shard as it is read from the store, the samples in packed micro-batches, and the account of both.

A shard is read when it is needed, or ahead, while the batch before it trains. ``assemble`` lays it out with its loss weights; fields that
the model, the critic or the objective gives come one by one, by ``with_field`` and ``with_values``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.batch_metrics import StatColumn, Sum, Table, empty_table, metrics_of_batch, stats_row
from services.trainer.objective.distillation import top_k_fields
from services.trainer.objective.reduce import denominator, passing, rollout_parts, sample_weights
from services.trainer.packing import NO_VERSION, PARTIAL, BadSample, PackedBatch, collect, pack, spread
from services.trainer.partition import Partition, RefusedSample, Untrainable, balance
from shared.config.algorithm import AlgorithmSection, Reducer
from shared.config.run_config import RunConfig
from shared.data.media import picture_check
from shared.model.families import replayed_choices
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.runtime.tasks import describe, run_in_thread
from shared.schema import sample
from shared.schema.digests import TrainedSample, attest
from shared.schema.messages import Attestation, Batch
from shared.schema.sample import NO_LIMIT, UNLIMITED, InvalidSample, Sample, SampleLimits, token_digest
from shared.store.payload_store import BlockingStore, StoreRefused

READ_SECONDS = 600.0  # the longest time that reading a shard ahead may take; each of its blobs has a deadline of its own


@dataclass(frozen=True)
class Shard:
    """The part of a batch that one data-parallel rank trains.

    Args:
        samples: by their indices in the partition. Their masks are those used in training: without tokens of versions below the
            batch's ``mask_below``, and 0 everywhere in samples that a filter removed.
        stats: this rank's rows of the batch's statistics; those of samples that others read are 0.
        rewards, raw: of the whole batch, where a convert function has made them: what advantages are made of, and what is shown.
    """

    partition: Partition
    samples: dict[int, Sample]
    stats: Table
    rewards: list[float] | None = None
    raw: list[float] | None = None


def sample_limits(config: RunConfig, vocabulary: int) -> SampleLimits:
    """Returns what every sample is held to that the run trains, or records to be trained. Raises ConfigError."""
    reader, shown, kept = config.log_probs_reader, picture_check(config), config.kept_top_k > 0
    return SampleLimits(vocabulary, log_probs_reader=reader, choices=replayed_choices(config), kept=kept, pictures=shown)


class ShardReader:
    """The reader of one rank's shards.

    Args:
        rank: the data-parallel rank. limits: those of the run's samples; the newest version is the batch's.
    """

    def __init__(self, store: BlockingStore, rank: int, limits: SampleLimits) -> None:
        self._store, self._rank, self._limits = store, rank, limits
        self._ahead: tuple[Batch, Future[Shard]] | None = None

    def read_ahead(self, partition: Partition) -> None:
        """Begins to read a shard that will be taken next, unless that has begun already."""
        if self._ahead is None or self._ahead[0] != partition.batch:
            self._ahead = partition.batch, run_in_thread(lambda: self._read(partition), "read-ahead")

    def take(self, partition: Partition) -> Shard:
        """Returns the shard of a batch.

        Raises DeadlineExceeded, StoreRefused; Untrainable: payloads that are missing, changed since they were scored, invalid, or not what
        their references say.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != partition.batch:  # it may have been amended since
            return self._read(partition)
        try:
            return ahead[1].result(READ_SECONDS)
        except TimeoutError:
            next_action = "this rank stops; restart all ranks from the newest checkpoint"
            raise DeadlineExceeded(f"the samples of step {partition.batch.step}", "the store", READ_SECONDS, next_action) from None

    def _read(self, partition: Partition) -> Shard:
        try:
            return self._shard(partition)
        except (DeadlineExceeded, StoreRefused):
            raise
        except Exception as error:  # whatever is wrong with a sample: it must not end the trainer in each of its lives
            refused = self._refused(partition)
            if not refused:
                raise
            raise Untrainable(partition.batch.step, refused) from error

    def _refused(self, partition: Partition) -> list[RefusedSample]:
        """Reads each group alone; returns the sample for which that fails, of each group that it fails for."""
        refused = []
        for index in partition.groups_of(self._rank):
            group = partition.batch.groups[index]
            try:
                self._group(partition.batch, index, self._store.read(group.payload))
            except (DeadlineExceeded, StoreRefused):
                raise
            except InvalidSample as error:
                refused.append(RefusedSample(group.group, error.position, error.problem))
            except Exception as error:
                refused.append(RefusedSample(group.group, 0, describe(error)))
        return refused

    def _group(self, batch: Batch, index: int, blobs: Iterable[bytes]) -> list[Sample]:
        reference = batch.groups[index]
        stored = sample.decode(blobs, replace(self._limits, newest=batch.version))
        lengths, names = [item.length for item in stored], [item.name for item in stored]
        if lengths != list(reference.payload.tokens):
            problem = f"{len(lengths)} samples of {lengths} tokens in the store, {list(reference.payload.tokens)} by its reference"
            raise BadMessage(f"group {reference.group}: {problem}")
        if names != [f"{reference.group}/{position}" for position in range(len(names))]:
            raise BadMessage(f"group {reference.group}: its samples in the store are {', '.join(names)}")
        for item in () if self._limits.kept else stored:
            item.kept = None
        return stored

    def _shard(self, partition: Partition) -> Shard:
        batch, own, removed = partition.batch, set(partition.samples_of(self._rank)), partition.removed()
        groups = partition.groups_of(self._rank)
        payloads = self._store.stream([batch.groups[group].payload for group in groups])
        indices = {(item.group, item.position): index for index, item in enumerate(partition.items)}
        samples, stats = {}, empty_table(len(partition.items))
        for group, blobs in zip(groups, payloads, strict=True):
            stored = self._group(batch, group, blobs)
            for position, item in enumerate(stored):
                index = indices[group, position]
                if index in own:
                    samples[index] = _as_trained(item, batch.mask_below, index in removed)
                    stats[index] = stats_row(samples[index], 0 if index in removed else int(np.count_nonzero(item.mask)))
        return Shard(partition, samples, stats)


def _as_trained(stored: Sample, mask_below: int, removed: bool) -> Sample:
    if removed:
        return replace(stored, mask=np.zeros_like(stored.mask))
    return replace(stored, mask=stored.mask & (stored.versions() >= mask_below)) if mask_below else stored


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


def assemble(shard: Shard, stats: Table, objective: AlgorithmSection, *, rank: int, limits: SampleLimits = UNLIMITED) -> TrainBatch:
    """Lays a shard out, each token weighted so that sums over micro-batches and ranks are the batch's means.

    Optimizer steps of which no rank trains a token are left out. Samples that do not pass (`passing`) have weight 0.

    Args:
        stats: of the whole batch. rank: this data-parallel rank. limits: with the policy's vocabulary, and choices as `pack` takes them.

    Raises:
        BadSample: a sample that cannot be trained on. BadBatch: no token of the batch is trained.
    """
    partition, steps, denominators = shard.partition, [], []
    rewards = partition.rewards if shard.rewards is None else shard.rewards
    partial, passes = bool(stats[:, StatColumn.UNDRAWN].any()), passing(objective, rewards)
    trained = stats[:, StatColumn.TRAINED] * passes
    parts = rollout_parts(trained, rollouts_of(partition, stats)) * passes
    for placement in partition.steps:
        members = sorted(index for ranks in placement for micro_batch in ranks for index in micro_batch)
        if stats[members, StatColumn.TRAINED].any():
            given = trained[members], parts[members], objective.reducer
            found = sample_weights(*given, objective.loss_divisor) * passes[members]
            weights = dict(zip(members, found.tolist(), strict=True))
            steps.append([_micro_batch(indices, shard, weights, objective, limits, partial=partial) for indices in placement[rank]])
            denominators.append(denominator(*given))
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
    reducer: Reducer = "token_mean" if objective.calculate_per_token_loss else "rollout_mean"  # a divisor is RL's alone
    weights = sample_weights(trained, rollout_parts(trained, [sample.group for sample in samples]), reducer).tolist()
    placement = balance([min(sample.length, most) for sample in samples], dp_size, max_tokens)
    return [pack([samples[index] for index in indices], [weights[index] for index in indices]) for indices in placement[dp_rank]]


def rollouts_of(partition: Partition, stats: Table) -> list[tuple[int, int]]:
    """Returns each sample's rollout, unique over the whole batch: (its group's index, its index in the group)."""
    return [(item.group, int(rollout)) for item, rollout in zip(partition.items, stats[:, StatColumn.ROLLOUT], strict=True)]


def baselines_of(partition: Partition, stats: Table) -> list[tuple[int, float]]:
    """Returns what each sample's reward is compared with, unique over the whole batch: its group and its role in it."""
    return [(item.group, role) for item, role in zip(partition.items, stats[:, StatColumn.ROLE].tolist(), strict=True)]


def _micro_batch(
    indices: list[int], shard: Shard, weights: Mapping[int, float], objective: AlgorithmSection, limits: SampleLimits, *, partial: bool
) -> MicroBatch:
    """``partial``: samples of the batch, of whichever rank, lack the rollout's log-probs: only who knows that may read them."""
    samples = [shard.samples[index] for index in indices]
    packed = pack(samples, [weights[index] for index in indices], limits.choices)
    if partial:
        packed = packed.with_renamed("rollout_log_probs", PARTIAL)
    if objective.use_opd and objective.opd_type == "sglang":
        packed = packed.with_fields(**{TEACHER: spread(samples, [_teacher_log_probs(sample) for sample in samples], TEACHER)})
    if objective.opd_top_k:
        packed = packed.with_fields(**top_k_fields(samples, objective.opd_top_k, limits.vocabulary))
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


_HALF = 1 << 32  # a digest goes into the table in two halves, each exact in float64


def attestation_of(batch: TrainBatch, total: Sum, read: Mapping[int, Sample] = {}) -> Attestation:
    """Returns the attestation of the whole batch, the same on every rank.

    Args:
        total: the sum of a table over the data-parallel ranks; a collective. read: this rank's samples as they were scored, where a convert
            function may have masked tokens since.
    """
    items, groups = batch.partition.items, batch.partition.batch.groups
    table = np.zeros((len(items), 4))  # of each sample: trained tokens, the oldest one's version, both halves of the digest
    for micro_batch in (micro_batch for step in batch.steps for micro_batch in step):
        packed = micro_batch.packed
        tokens, mask, versions = packed.tokens.numpy(), packed.loss_mask.numpy() > 0, packed.fields["versions"].numpy()
        for index, (start, end) in zip(micro_batch.indices, pairwise(packed.cu_seqlens.tolist()), strict=False):
            table[index] = _attested(versions[start:end][mask[start:end]], token_digest(tokens[start:end]))
    for index, scored in read.items():
        table[index] = _attested(scored.versions()[scored.mask != 0], scored.token_digest())
    rows = zip(items, total(table).astype(np.int64).tolist(), strict=True)
    return attest(
        TrainedSample(groups[item.group].group, item.position, trained, oldest, high * _HALF + low)
        for item, (trained, oldest, high, low) in rows
    )


def _attested(trained: NDArray[Any], digest: int) -> tuple[int, ...]:
    return len(trained), trained.min() if len(trained) else 0, digest // _HALF, digest % _HALF
