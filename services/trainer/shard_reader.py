"""Reading of a rank's shard of each batch from the store: when it is needed, or ahead, while the batch before it trains."""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from services.trainer.batch_metrics import Table, empty_table, stats_row
from services.trainer.partition import Partition
from services.trainer.untrainable import RefusedSample, Untrainable
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.runtime.tasks import describe, run_in_thread
from shared.schema import sample
from shared.schema.messages import Batch
from shared.schema.sample import InvalidSample, Sample, SampleLimits
from shared.store.payload_store import BlockingStore, StoreRefused

READ_SECONDS = 600.0
"""The longest time that reading a shard ahead may take; each of its blobs has a deadline of its own."""


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
            what, next_action = (
                f"the samples of step {partition.batch.step}",
                "this rank stops; restart all ranks from the newest checkpoint",
            )
            raise DeadlineExceeded(what, "the store", READ_SECONDS, next_action) from None

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
        """Returns the checked samples of the ``index``-th group of a batch. Raises BadMessage, and whatever a broken blob leads to."""
        reference = batch.groups[index]
        stored = sample.decode(blobs, replace(self._limits, newest=batch.version))
        lengths, names = [item.length for item in stored], [item.name for item in stored]
        if lengths != list(reference.payload.tokens):
            problem = f"{len(lengths)} samples of {lengths} tokens in the store, {list(reference.payload.tokens)} by its reference"
            raise BadMessage(f"group {reference.group}: {problem}")
        if names != [f"{reference.group}/{position}" for position in range(len(names))]:
            raise BadMessage(f"group {reference.group}: its samples in the store are {', '.join(names)}")
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
