"""Sets of intervals, checked against counting the cells of a grid."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.view.flow_history import measure, overlap, union

CELLS = 40
intervals = st.lists(st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)), max_size=12)
"""On whole numbers, so that a cell [n, n + 1) is either in an interval or not; some of them end before they start."""


def cells(pairs: list[tuple[int, int]]) -> set[int]:
    return {cell for start, end in pairs for cell in range(start, end)}


@given(intervals, intervals)
def test_overlap_is_what_both_sets_cover(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert overlap(one, other) == len(cells(one) & cells(other))


@given(intervals)
def test_measure_counts_each_point_once(pairs: list[tuple[int, int]]) -> None:
    assert measure(pairs) == len(cells(pairs))


@given(intervals, intervals)
def test_results_are_disjoint_and_in_order(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    for result in (union(one), union([*one, *other])):
        assert all(start < end for start, end in result)
        assert all(before[1] <= after[0] for before, after in pairwise(result))


@given(intervals, intervals)
def test_overlap_does_not_mind_the_order(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert overlap(one, other) == overlap(other, one)
    assert overlap(one, one) == measure(one)


def test_touching_intervals_become_one() -> None:
    assert union([(2.0, 3.0), (1.0, 2.0), (5.0, 5.0)]) == [(1.0, 3.0)]


def test_generation_of_two_groups_over_one_step() -> None:
    """Groups from 0 to 4 and 3 to 6, a step from 2 to 5: generation and training run together for 3 seconds."""
    assert overlap([(0.0, 4.0), (3.0, 6.0)], [(2.0, 5.0)]) == pytest.approx(3.0)


def test_nothing_overlaps_nothing() -> None:
    assert overlap([], [(0.0, 1.0)]) == 0
