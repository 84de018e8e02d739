"""The partition of a batch among the ranks: decided from its references alone, the same on every rank, before a payload is read."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.trainer.placement import balance
from services.trainer.untrainable import RefusedSample, Untrainable
from shared.schema.messages import Batch, BatchGroup
from shared.schema.sample import too_long

Cost = Callable[[int], float]
"""The cost of training a sample of so many tokens, in any unit, by which ranks and micro-batches are balanced."""

Placement = list[list[list[int]]]
"""``[rank][micro-batch]``: ascending indices of samples."""


@dataclass(frozen=True, slots=True)
class PartitionItem:
    """One sample of a batch: ``position`` in its group, which is the ``group``-th of the batch. ``tokens``: prompt and response."""

    group: int
    position: int
    tokens: int


@dataclass(frozen=True)
class Partition:
    """A batch partitioned among the ranks. A sample's index is its place in the order of the batch's references.

    Args:
        batch: the references. items: its samples. steps: the placement of each optimizer step; every sample is in exactly one.
    """

    batch: Batch
    items: list[PartitionItem]
    steps: list[Placement]

    def samples_of(self, rank: int) -> list[int]:
        """Returns the samples that a data-parallel rank trains."""
        return sorted(index for placement in self.steps for micro_batch in placement[rank] for index in micro_batch)

    def groups_of(self, rank: int) -> list[int]:
        """Returns the groups that a data-parallel rank reads: those that it trains a sample of."""
        return sorted({self.items[index].group for index in self.samples_of(rank)})

    def removed(self) -> set[int]:
        """Returns the samples that a filter took out of the loss."""
        return {index for index, item in enumerate(self.items) if item.position in self.batch.groups[item.group].removed}

    def name(self, index: int) -> str:
        """Returns a sample's name in messages and keys: its group's id, and its position there."""
        item = self.items[index]
        return f"{self.batch.groups[item.group].group}/{item.position}"

    @property
    def rewards(self) -> list[float]:
        """Returns the batch's rewards as they were scored, by the samples' indices."""
        return [reward for group in self.batch.groups for reward in group.rewards]

    @property
    def parts(self) -> list[dict[str, float]]:
        """Returns the samples' named rewards, by their indices: nothing of those without."""
        return [parts for group in self.batch.groups for parts in group.parts or ({},) * len(group.rewards)]


def partition_batch(
    batch: Batch,
    optimizer_steps: int,
    dp_size: int,
    max_tokens: int,
    cost: Cost = float,
    longest: int | None = None,
    *,
    closely: bool = False,
) -> Partition:
    """Partitions a batch among optimizer steps, ranks and micro-batches.

    Args:
        max_tokens: the most tokens of a micro-batch. longest: the most of a sample, default: as many; a sample of more tokens than a
            micro-batch holds is one by itself. closely: samples of a group go into the same micro-batches, where that costs nothing.

    Raises:
        Untrainable: references that do not say how long their samples are, and samples over ``longest``.
    """
    if refused := [found for group in batch.groups if (found := _refused(group, longest or max_tokens)) is not None]:
        raise Untrainable(batch.step, refused)
    groups = enumerate(batch.groups)
    items = [PartitionItem(index, position, tokens) for index, group in groups for position, tokens in enumerate(group.payload.tokens)]
    trained = [item.position not in (*batch.groups[item.group].removed, *batch.groups[item.group].stale) for item in items]
    steps = [_placed(part, items, dp_size, max_tokens, cost, closely) for part in parts(trained, optimizer_steps)]
    return Partition(batch, items, steps)


def _refused(group: BatchGroup, max_tokens: int) -> RefusedSample | None:
    lengths = group.payload.tokens
    if len(lengths) != len(group.rewards):
        return RefusedSample(group.group, 0, f"its reference has {len(lengths)} lengths for {len(group.rewards)} rewards")
    longest = max(lengths, default=0)
    return RefusedSample(group.group, lengths.index(longest), too_long(longest, max_tokens)) if longest > max_tokens else None


def parts(trained: Sequence[bool], count: int) -> list[range]:
    """Cuts the samples into consecutive parts; their numbers of ``trained`` samples differ by one at most.

    A part without trained samples is no optimizer step: where fewer samples than ``count`` are trained, there are fewer parts.
    """
    trained_before = list(itertools.accumulate(trained))  # up to and with each
    total = trained_before[-1]
    cuts = [bisect_left(trained_before, total * part // count) + 1 for part in range(1, count) if total * part // count]
    found = [range(start, end) for start, end in itertools.pairwise([0, *cuts, len(trained)])]
    return [part for part in found if any(trained[index] for index in part)] or [range(len(trained))]


def _placed(part: range, items: list[PartitionItem], dp_size: int, max_tokens: int, cost: Cost, closely: bool) -> Placement:
    chosen = [items[index] for index in part]
    lengths = [item.tokens for item in chosen]
    filled = [min(length, max_tokens) for length in lengths]
    costs, units = [cost(length) for length in lengths], [item.group for item in chosen]
    placement = balance(filled, dp_size, max_tokens, costs=costs, units=units, closely=closely)
    return [[[part.start + index for index in micro_batch] for micro_batch in rank] for rank in placement]
