"""Which rank trains which samples of a batch: decided from its references alone, the same on every rank, before anybody reads a payload."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.trainer.placement import SampleTooLong, balance
from shared.runtime.errors import BadMessage
from shared.schema.messages import Batch, BatchGroup

Cost = Callable[[int], float]
"""What a sample of so many tokens costs to train, in any unit: what ranks and micro-batches are evened out by."""

Placement = list[list[list[int]]]
"""``[rank][micro-batch]``: ascending numbers of samples."""


@dataclass(frozen=True, slots=True)
class PartitionItem:
    """One sample of a batch: ``position`` in its group, which is number ``group`` of the batch. ``tokens``: prompt and response."""

    group: int
    position: int
    tokens: int


@dataclass(frozen=True)
class Partition:
    """A batch dealt out. Samples are numbered in the order of its references.

    Args:
        batch: the references. items: its samples. steps: the placement of each optimizer step; every sample is in exactly one.
    """

    batch: Batch
    items: list[PartitionItem]
    steps: list[Placement]

    def own(self, rank: int) -> list[int]:
        """The samples that a data-parallel rank trains."""
        return sorted(number for placement in self.steps for micro_batch in placement[rank] for number in micro_batch)

    def groups(self, rank: int) -> list[int]:
        """The groups that a data-parallel rank reads: those that it trains a sample of."""
        return sorted({self.items[number].group for number in self.own(rank)})

    def removed(self) -> set[int]:
        """The samples that a filter took out of the loss."""
        return {number for number, item in enumerate(self.items) if item.position in self.batch.groups[item.group].removed}

    def name(self, number: int) -> str:
        """A sample's name in messages and keys: its group's id, and its position there."""
        item = self.items[number]
        return f"{self.batch.groups[item.group].group}/{item.position}"


def partition_batch(batch: Batch, optimizer_steps: int, dp_size: int, max_tokens: int, cost: Cost = float) -> Partition:
    """Deals a batch out to optimizer steps, ranks and micro-batches.

    Args:
        max_tokens: that a micro-batch may hold.

    Raises:
        BadMessage: a reference that does not say how long its samples are. SampleTooLong: a sample over ``max_tokens``, by its name.
    """
    items = [item for number, group in enumerate(batch.groups) for item in _items(batch, number, group)]
    for item in items:
        if item.tokens > max_tokens:
            raise SampleTooLong(f"{batch.groups[item.group].group}/{item.position}", item.tokens, max_tokens)
    trained = [item.position not in (*batch.groups[item.group].removed, *batch.groups[item.group].stale) for item in items]
    steps = [_placed(part, items, dp_size, max_tokens, cost) for part in parts(trained, optimizer_steps)]
    return Partition(batch, items, steps)


def parts(trained: Sequence[bool], count: int) -> list[range]:
    """Consecutive parts that every sample is in one of; their numbers of samples that are ``trained`` differ by one at most.

    A part of which nothing is trained is no optimizer step: where fewer samples than ``count`` are trained, there are fewer parts.
    """
    behind = list(itertools.accumulate(trained))  # trained samples up to and with each
    total = behind[-1]
    cuts = [bisect_left(behind, total * part // count) + 1 for part in range(1, count) if total * part // count]
    dealt = [range(start, end) for start, end in itertools.pairwise([0, *cuts, len(trained)])]
    return [part for part in dealt if any(trained[number] for number in part)] or [range(len(trained))]


def _items(batch: Batch, number: int, group: BatchGroup) -> list[PartitionItem]:
    lengths = group.payload.tokens
    if len(lengths) != len(group.rewards):
        said = f"its reference has {len(lengths)} lengths for {len(group.rewards)} rewards"
        raise BadMessage(f"group {group.group} of step {batch.step}: {said}")
    return [PartitionItem(number, position, tokens) for position, tokens in enumerate(lengths)]


def _placed(part: range, items: list[PartitionItem], dp_size: int, max_tokens: int, cost: Cost) -> Placement:
    chosen = [items[number] for number in part]
    lengths = [item.tokens for item in chosen]
    placement = balance(lengths, dp_size, max_tokens, costs=[cost(length) for length in lengths], units=[item.group for item in chosen])
    return [[[part.start + index for index in micro_batch] for micro_batch in rank] for rank in placement]
