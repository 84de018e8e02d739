"""Reading of a rank's shard of each batch from the store: when it is needed, or ahead, while the batch before it trains."""

from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from services.trainer.batch_metrics import Table, empty_table, stats_row
from services.trainer.packing import check_vocabulary
from services.trainer.partition import Partition
from shared.runtime.daemon_thread import run_in_thread
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.schema import sample
from shared.schema.sample import Sample
from shared.store.payload_store import BlockingStore

READ_SECONDS = 600.0
"""The longest time that reading a shard ahead may take; each of its blobs has a deadline of its own."""


@dataclass(frozen=True)
class Shard:
    """The part of a batch that one data-parallel rank trains.

    Args:
        samples: by their indices in the partition. Their masks are those used in training: without tokens of versions below the
            batch's ``mask_below``, and 0 everywhere in samples that a filter removed.
        stats: this rank's rows of the batch's statistics; those of samples that others read are 0.
    """

    partition: Partition
    samples: dict[int, Sample]
    stats: Table


class ShardReader:
    """The reader of one rank's shards.

    Args:
        rank: the data-parallel rank. vocab_size: the model's; no sample may hold a token beyond it.
    """

    def __init__(self, store: BlockingStore, rank: int, vocab_size: int) -> None:
        self._store, self._rank, self._vocab_size = store, rank, vocab_size
        self._ahead: tuple[int, Future[Shard]] | None = None

    def read_ahead(self, partition: Partition) -> None:
        """Begins to read a shard that will be taken next, unless that has begun already."""
        step = partition.batch.step
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = step, run_in_thread(lambda: self._read(partition), "read-ahead")

    def take(self, partition: Partition) -> Shard:
        """Returns the shard of a batch.

        Raises PayloadMissing, DeadlineExceeded, StoreRefused; PayloadChanged: the samples are not those that were scored; BadMessage: they
        are not what their reference says; BadSample: a token outside the model's vocabulary.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != partition.batch.step:
            return self._read(partition)
        try:
            return ahead[1].result(READ_SECONDS)
        except TimeoutError:
            what, next_action = f"the samples of step {ahead[0]}", "this rank stops; restart all ranks from the newest checkpoint"
            raise DeadlineExceeded(what, "the store", READ_SECONDS, next_action) from None

    def _read(self, partition: Partition) -> Shard:
        batch, own, removed = partition.batch, set(partition.samples_of(self._rank)), partition.removed()
        groups = partition.groups_of(self._rank)
        payloads = self._store.stream([batch.groups[group].payload for group in groups])
        indices = {(item.group, item.position): index for index, item in enumerate(partition.items)}
        samples, stats = {}, empty_table(len(partition.items))
        for group, blobs in zip(groups, payloads, strict=True):
            reference, stored = batch.groups[group], sample.decode(blobs)
            lengths = [item.length for item in stored]
            if lengths != list(reference.payload.tokens):
                problem = f"{len(lengths)} samples of {lengths} tokens in the store, {list(reference.payload.tokens)} by its reference"
                raise BadMessage(f"group {reference.group} of step {batch.step}: {problem}")
            for position, item in enumerate(stored):
                index = indices[group, position]
                if index in own:
                    check_vocabulary(item, self._vocab_size)
                    samples[index] = _as_trained(item, batch.mask_below, index in removed)
                    stats[index] = stats_row(samples[index], 0 if index in removed else int(np.count_nonzero(item.mask)))
        return Shard(partition, samples, stats)


def _as_trained(stored: Sample, mask_below: int, removed: bool) -> Sample:
    if removed:
        return replace(stored, mask=np.zeros_like(stored.mask))
    return replace(stored, mask=stored.mask & (stored.versions() >= mask_below)) if mask_below else stored
