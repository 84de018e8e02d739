"""A rank's share of each batch, out of the store: read when it is asked for, or ahead, while the batch before it trains."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass

from services.trainer.collective import CollectiveThread
from services.trainer.partition import Partition
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.schema import sample
from shared.store.payload_store import BlockingStore

READ_SECONDS = 600.0
"""How long a share that is read ahead may take; each of its blobs has a deadline of its own."""


@dataclass(frozen=True)
class Shard:
    """What one data-parallel rank trains of a batch. ``samples``: by their numbers in the deal."""

    deal: Partition
    samples: dict[int, sample.Sample]


class ShardReader:
    """Reads one rank's shares.

    Args:
        rank: the data-parallel rank.
    """

    def __init__(self, store: BlockingStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._thread = CollectiveThread("read-ahead")
        self._ahead: tuple[int, Future[Shard]] | None = None

    def ahead(self, deal: Partition) -> None:
        """Begins to read a share that will be taken next, unless it is on its way already."""
        if self._ahead is None or self._ahead[0] != deal.batch.step:
            self._ahead = deal.batch.step, self._thread.submit(lambda: read(deal, self._rank, self._store))

    def take(self, deal: Partition) -> Shard:
        """The share of a batch. Raises PayloadMissing, DeadlineExceeded, StoreRefused, BadMessage (payload and reference differ)."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != deal.batch.step:
            return read(deal, self._rank, self._store)
        try:
            return ahead[1].result(READ_SECONDS)
        except TimeoutError:
            self._thread.abandon()
            what, then = f"the samples of step {deal.batch.step}", "this rank stops; restart all ranks from the newest checkpoint"
            raise DeadlineExceeded(what, "the store", READ_SECONDS, then) from None

    def close(self) -> None:
        self._thread.abandon()


def read(deal: Partition, rank: int, store: BlockingStore) -> Shard:
    """One rank's share, group by group. Raises as `ShardReader.take`."""
    own, step = set(deal.own(rank)), deal.batch.step
    groups = deal.groups(rank)
    blobs = store.stream([key for number in groups for key in deal.batch.groups[number].payload.keys])
    numbers = {(item.group, item.position): number for number, item in enumerate(deal.items)}
    samples: dict[int, sample.Sample] = {}
    for group in groups:
        reference = deal.batch.groups[group]
        found = sample.decode(itertools.islice(blobs, len(reference.payload.keys)))
        lengths = tuple(len(one.prompt) + len(one.response) for one in found)
        if lengths != reference.payload.tokens:
            said = f"{len(lengths)} samples of {list(lengths)} tokens in the store, {list(reference.payload.tokens)} by its reference"
            raise BadMessage(f"group {reference.group} of step {step}: {said}")
        for position, one in enumerate(found):
            if (number := numbers[group, position]) in own:
                samples[number] = one
    return Shard(deal, samples)
