"""The partition of a batch among the ranks: decided from its references alone, the same on every rank, before a payload is read.

Invariants of the placement in micro-batches, all of them properties that the tests check at random:

- every sample of the batch is in exactly one micro-batch of exactly one rank;
- every rank runs the same number of micro-batches (pipeline and expert parallel ranks meet in each of them);
- no micro-batch exceeds the token budget, but for a sample that alone does: it is refused or one by itself, never cut;
- a micro-batch is empty only where there are too few samples, in the batch or in the units given to a rank
  (``packing.pack`` then makes a filler, so that the rank still meets the others);
- samples of one unit (a group: they lie together in the store) are on one rank, unless that would leave the ranks with
  unlike work; then each sample goes where it fits best;
- the same samples in the same order give the same placement, on every rank and in every run.
"""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pydantic.dataclasses import dataclass as checked_dataclass

from shared.runtime.errors import MyxoError
from shared.schema.message import Reason
from shared.schema.messages import Batch, BatchGroup
from shared.schema.sample import too_long


@checked_dataclass(frozen=True, order=True)
class RefusedSample:
    """A sample that cannot be trained: the first such one of its group, ``position`` in it.

    ``reason``: cut, for it may quote what the sample holds.
    """

    group: str
    position: int
    reason: Reason


class Untrainable(MyxoError):
    """The batch of ``step`` cannot be trained as it is.

    Args:
        samples: why; at least one, of each group one at most.
    """

    def __init__(self, step: int, samples: Sequence[RefusedSample]) -> None:
        self.step, self.samples = step, list(samples)
        first, others = self.samples[0], len(self.samples) - 1
        also = f", and {others} more groups" if others else ""
        super().__init__(f"step {step} cannot be trained with sample {first.group}/{first.position}: {first.reason}{also}")


MAX_IMBALANCE = 0.05  # the fraction by which the rank of highest cost may be above the mean before units are split

_Members: TypeAlias = "int | tuple[_Members, _Members]"
_Filled: TypeAlias = tuple[float, int, _Members]


class SampleTooLong(MyxoError):
    """A sample that alone exceeds a micro-batch's token budget.

    Args:
        sample: its name. tokens: its length, prompt and response. budget: tokens a micro-batch may hold.
    """

    def __init__(self, sample: str, tokens: int, budget: int) -> None:
        self.sample, self.tokens, self.budget = sample, tokens, budget
        super().__init__(f"sample {sample} {too_long(tokens, budget)}")


def balance(
    lengths: Sequence[int],
    dp_size: int,
    max_tokens_per_rank: int,
    *,
    costs: Sequence[float] | None = None,
    units: Sequence[Hashable] | None = None,
    whole_groups: bool = False,
) -> list[list[list[int]]]:
    """Deals samples to ranks and micro-batches: ``placement[rank][micro_batch]`` is an ascending list of indices.

    With units, whole units are dealt to ranks by differencing, and each rank's samples to micro-batches, as many on each
    rank as the one that needs most has. Where that leaves a rank more than `MAX_IMBALANCE` above the mean, and without units: the number
    of micro-batches a rank is the smallest, from the lower bound up, at which differencing keeps every bin in the
    budget. The bins, the most expensive first, are dealt back and forth over the ranks: what runs at the same time is alike, and
    the totals of any two ranks differ by at most the difference of the dearest and the cheapest bin.

    Args:
        lengths: tokens of each sample. max_tokens_per_rank: tokens a micro-batch may hold.
        costs: the amounts to balance, > 0 each (for example FLOPs); tokens if not given. The budget is always in tokens.
        units: the unit of each sample; those of one unit should stay together.
        whole_groups: keep a unit's samples in one micro-batch as well, where that needs no further micro-batch.

    Raises SampleTooLong, which names the sample by its index.
    """
    costs = [float(cost) for cost in (lengths if costs is None else costs)]
    for index, length in enumerate(lengths):
        if length > max_tokens_per_rank:
            raise SampleTooLong(f"number {index} of the batch", length, max_tokens_per_rank)
    if units is not None and (together := _whole_units(lengths, costs, units, dp_size, max_tokens_per_rank, whole_groups)) is not None:
        return together
    count = max(1, -(-_fewest_bins(lengths, max_tokens_per_rank) // dp_size))
    # Ends at the latest with as many bins as samples: differencing then leaves every sample alone.
    while (placed := _within_budget(lengths, costs, dp_size * count, max_tokens_per_rank)) is None:
        count += 1
    rows = _rows(placed, costs, dp_size)
    dealt = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rows)]
    return [[row[rank] for row in dealt] for rank in range(dp_size)]


def _whole_units(
    lengths: Sequence[int], costs: Sequence[float], units: Sequence[Hashable], dp_size: int, budget: int, whole_groups: bool
) -> list[list[list[int]]] | None:
    """Returns the placement that splits no unit; None where it would leave the ranks with unlike work."""
    ranks = _ranks_of_units(costs, units, dp_size)
    if max(sum(costs[i] for i in rank) for rank in ranks) > (1 + MAX_IMBALANCE) * sum(costs) / dp_size:
        return None
    count = max(_fewest_bins([lengths[i] for i in rank], budget) for rank in ranks)
    while (placed := _bins_of_ranks(ranks, lengths, costs, count, budget)) is None:
        count += 1
    if whole_groups and count > 1:
        closer = (_close_bins(rank, lengths, costs, units, count, budget) for rank in ranks)
        placed = [found or bins for found, bins in zip(closer, placed, strict=True)]
    return [[members for (members,) in _rows(bins, costs, 1)] for bins in placed]


def _bins_of_ranks(
    ranks: Sequence[list[int]], lengths: Sequence[int], costs: Sequence[float], count: int, budget: int
) -> list[list[list[int]]] | None:
    placed = [_bins_of_rank([[i] for i in rank], lengths, costs, count, budget) for rank in ranks]
    found = [bins for bins in placed if bins is not None]
    return found if len(found) == len(ranks) else None


def _ranks_of_units(costs: Sequence[float], units: Sequence[Hashable], dp_size: int) -> list[list[int]]:
    """Returns the samples of each rank, with whole units dealt by differencing."""
    members: dict[Hashable, list[int]] = {}
    for index, unit in enumerate(units):
        members.setdefault(unit, []).append(index)
    together = list(members.values())
    unit_costs = [sum(costs[i] for i in indices) for indices in together]
    return [sorted(i for unit in dealt for i in together[unit]) for dealt in differencing(unit_costs, dp_size)]


def _bins_of_rank(
    pieces: list[list[int]], lengths: Sequence[int], costs: Sequence[float], count: int, budget: int
) -> list[list[int]] | None:
    """Returns ``count`` micro-batches of a rank's samples, in pieces that stay whole; None where they do not fit."""
    tokens, dear = [sum(lengths[i] for i in piece) for piece in pieces], [sum(costs[i] for i in piece) for piece in pieces]
    placed = _within_budget(tokens, dear, count, budget)
    return None if placed is None else [sorted(i for piece in members for i in pieces[piece]) for members in placed]


def _close_bins(
    rank: list[int], lengths: Sequence[int], costs: Sequence[float], units: Sequence[Hashable], count: int, budget: int
) -> list[list[int]] | None:
    """Returns ``count`` micro-batches of a rank's samples, in each of them large pieces of units; None where only small ones fit."""
    for most in (budget, budget // 2, budget // 4):
        pieces = _pieces(rank, lengths, units, most)
        if len(pieces) >= count and (bins := _bins_of_rank(pieces, lengths, costs, count, budget)) is not None:
            return bins
    return None


def _pieces(rank: list[int], lengths: Sequence[int], units: Sequence[Hashable], most: int) -> list[list[int]]:
    """Cuts each unit into runs of its samples, in order, of at most ``most`` tokens, or of one sample that has more."""
    found: list[list[int]] = []
    latest: dict[Hashable, tuple[list[int], int]] = {}  # of each unit the last run, and its tokens
    for index in rank:
        run, tokens = latest.get(units[index], ([], most))
        if tokens + lengths[index] > most:
            found.append(run := [])
            tokens = 0
        run.append(index)
        latest[units[index]] = run, tokens + lengths[index]
    return found


def _rows(bins: list[list[int]], costs: Sequence[float], width: int) -> list[list[list[int]]]:
    """Returns the bins by falling cost, ``width`` a row."""
    ordered = sorted(bins, key=lambda members: (-sum(costs[i] for i in members), members))
    return [ordered[start : start + width] for start in range(0, len(ordered), width)]


def _fewest_bins(lengths: Sequence[int], budget: int) -> int:
    """Returns a lower bound: a bin holds ``budget`` tokens, and at most j samples longer than ``budget / (j + 1)``."""
    counts = [(j, sum(length * (j + 1) > budget for length in lengths)) for j in range(1, 9)]
    return max(-(-sum(lengths) // budget), *(-(-count // j) for j, count in counts))


def _within_budget(lengths: Sequence[int], costs: Sequence[float], bins: int, budget: int) -> list[list[int]] | None:
    """Returns ``bins`` sets of indices, none over ``budget`` tokens, balanced by cost or else by tokens; None if neither fits."""
    by_tokens = [float(length) for length in lengths]
    for measure in [costs] if costs == by_tokens else [costs, by_tokens]:
        placed = differencing(measure, bins)
        if all(sum(lengths[i] for i in members) <= budget for members in placed):
            return placed
    return None


def differencing(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Splits indices into ``bins`` sets of like total cost; no set is empty while there are samples enough.

    Each sample starts as a partition of its own, of one filled set and ``bins - 1`` empty ones. The two partitions with
    the widest spread (dearest set less cheapest) are merged, the dearest set of one with the cheapest of the other,
    until one is left. Empty sets are not stored. Ties go to the lowest index, so the result is a function of its input
    alone. No merge makes a spread wider than the wider of the two, so the sets differ by at most the largest cost.

    Source: Karmarkar and Karp 1982, the largest differencing method for more than two sets. n - 1 merges of at most
    O(bins log bins) each.
    """
    # A set: (-cost, lowest index, members as a tree of pairs). A heap entry: (-spread, lowest index, sets by falling
    # cost). The lowest index is unique, so no comparison ever reaches the fields behind it.
    heap: list[tuple[float, int, list[_Filled]]] = [
        (-cost if bins > 1 else 0.0, index, [(-cost, index, index)]) for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first_index, first = heapq.heappop(heap)
        _, second_index, second = heapq.heappop(heap)
        # The dearest of one meets the cheapest of the other: only the last `overlap` filled sets of each coincide.
        overlap = max(0, len(first) + len(second) - bins)
        alone, other_alone = len(first) - overlap, len(second) - overlap
        merged = first[:alone] + second[:other_alone]
        for (cost, index, members), (other_cost, other_index, others) in zip(first[alone:], reversed(second[other_alone:]), strict=True):
            merged.append((cost + other_cost, min(index, other_index), (members, others)))
        merged.sort()
        spread = (merged[-1][0] if len(merged) == bins else 0.0) - merged[0][0]
        heapq.heappush(heap, (-spread, min(first_index, second_index), merged))
    placed = [_leaves(members) for _, _, members in heap[0][2]] if heap else []
    return placed + [[] for _ in range(bins - len(placed))]


def _leaves(members: _Members) -> list[int]:
    """Returns the indices in a tree of pairs, ascending; without recursion, since a tree may be as deep as it has leaves."""
    indices, rest = [], [members]
    while rest:
        node = rest.pop()
        if isinstance(node, int):
            indices.append(node)
        else:
            rest.extend(node)
    return sorted(indices)


Cost = Callable[[int], float]  # the cost of training a sample of so many tokens, in any unit, by which ranks and micro-batches are balanced

Placement = list[list[list[int]]]  # ``[rank][micro-batch]``: ascending indices of samples


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
    whole_groups: bool = False,
) -> Partition:
    """Partitions a batch among optimizer steps, ranks and micro-batches.

    Args:
        max_tokens: the most tokens of a micro-batch. longest: the most of a sample, default: as many; a sample of more tokens than a
            micro-batch holds is one by itself. whole_groups: keep a group in one micro-batch, where that needs no further one.

    Raises:
        Untrainable: references that do not say how long their samples are, and samples over ``longest``.
    """
    if refused := [found for group in batch.groups if (found := _refused(group, longest or max_tokens)) is not None]:
        raise Untrainable(batch.step, refused)
    groups = enumerate(batch.groups)
    items = [PartitionItem(index, position, tokens) for index, group in groups for position, tokens in enumerate(group.payload.tokens)]
    trained = [item.position not in (*batch.groups[item.group].removed, *batch.groups[item.group].stale) for item in items]
    steps = [_placed(part, items, dp_size, max_tokens, cost, whole_groups) for part in parts(trained, optimizer_steps)]
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


def _placed(part: range, items: list[PartitionItem], dp_size: int, max_tokens: int, cost: Cost, whole_groups: bool) -> Placement:
    chosen = [items[index] for index in part]
    lengths = [item.tokens for item in chosen]
    filled = [min(length, max_tokens) for length in lengths]
    costs, units = [cost(length) for length in lengths], [item.group for item in chosen]
    placement = balance(filled, dp_size, max_tokens, costs=costs, units=units, whole_groups=whole_groups)
    return [[[part.start + index for index in micro_batch] for micro_batch in rank] for rank in placement]
