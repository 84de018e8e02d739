"""The order of rows is a function of the running number alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.order import EpochOrder

SIZES, SEEDS = st.integers(1, 40), st.integers(0, 2**31)


@given(SIZES, SEEDS, st.booleans())
def test_every_epoch_uses_every_row_once(size: int, seed: int, shuffle: bool) -> None:
    order = EpochOrder(size, shuffle, seed)
    for epoch in range(3):
        assert sorted(order.row(epoch * size + place) for place in range(size)) == list(range(size))


@given(SIZES, SEEDS, st.lists(st.integers(0, 200), max_size=20))
def test_a_row_does_not_depend_on_what_was_asked_before(size: int, seed: int, numbers: list[int]) -> None:
    order = EpochOrder(size, True, seed)
    assert [order.row(number) for number in numbers] == [EpochOrder(size, True, seed).row(number) for number in numbers]


def test_without_shuffling_rows_come_in_file_order() -> None:
    order = EpochOrder(3, False, 1)
    assert [order.row(number) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_and_seeds_differ() -> None:
    rows = [tuple(EpochOrder(20, True, seed).row(epoch * 20 + place) for place in range(20)) for seed in (1, 5) for epoch in range(2)]
    assert len(set(rows)) == 4
