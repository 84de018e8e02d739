"""Measures of sets of time intervals: how long generation and training ran at the same time. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""(start, end) in seconds; one that ends before it starts holds nothing."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in ascending order; touching ones become one."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """The points that lie in both sets, as disjoint intervals in ascending order."""
    left, right = union(one), union(other)
    common: list[Interval] = []
    at_left = at_right = 0
    while at_left < len(left) and at_right < len(right):
        start = max(left[at_left][0], right[at_right][0])
        end = min(left[at_left][1], right[at_right][1])
        if end > start:
            common.append((start, end))
        if left[at_left][1] <= right[at_right][1]:
            at_left += 1
        else:
            at_right += 1
    return common


def measure(intervals: Iterable[Interval]) -> float:
    """Seconds that the set covers, points in several intervals counted once."""
    return sum(end - start for start, end in union(intervals))


def overlap(one: Iterable[Interval], other: Iterable[Interval]) -> float:
    """Seconds in which both sets have something: the measure of the intersection of their unions."""
    return measure(intersection(one, other))
