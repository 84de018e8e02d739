"""The curve in a terminal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxo.display.reward_chart import BLOCKS, text_chart


def test_a_column_a_step_where_there_is_room() -> None:
    assert text_chart([0.0, 0.5, 1.0], width=10, height=2) == ["1 ┤  █", "0 ┤▁██", "   step 1 3"]


def test_columns_are_means_of_their_part() -> None:
    lines = text_chart([0.0, 1.0, 1.0, 1.0], width=2, height=1)
    assert lines[0].endswith("▄█") and lines[-1].split() == ["step", "1", "4"]


def test_below_zero_the_lowest_value_is_the_ground() -> None:
    assert text_chart([-1.0, 1.0], width=4, height=2)[:2] == [" 1 ┤ █", "-1 ┤▁█"]


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_without_any_number_there_is_no_chart(values: list[float]) -> None:
    assert text_chart(values, width=10, height=3) == []


def test_a_step_without_a_number_stays_empty() -> None:
    assert text_chart([1.0, math.nan, 1.0], width=9, height=1)[0].endswith("┤█ █")


@given(st.lists(st.floats(width=32), max_size=200), st.integers(1, 80), st.integers(1, 12))
def test_any_numbers_fit(values: list[float], width: int, height: int) -> None:
    lines = text_chart(values, width=width, height=height)
    assert len(lines) in (0, height + 1)
    for line in lines[:-1]:
        cells = line.partition("┤")[2]
        assert len(cells) <= width and set(cells) <= set(BLOCKS)
