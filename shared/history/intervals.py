"""Measures of sets of time intervals: how long generation and training ran at the same time. Pure."""

from collections.abc import Iterable

Interval = tuple[float, float]
"""(start, end) in seconds; one that ends before it starts holds nothing."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same points as disjoint intervals in ascending order; touching ones become one."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def measure(intervals: Iterable[Interval]) -> float:
    """Returns the seconds that the set covers, points in several intervals counted once."""
    return sum(end - start for start, end in union(intervals))


def overlap(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    """Returns the seconds in which both sets have something: |A ∩ B| = |A| + |B| − |A ∪ B|."""
    left, right = union(left), union(right)
    return max(0.0, measure(left) + measure(right) - measure([*left, *right]))
