"""The order of rows is a function of the running number alone."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.data.rows import FeistelPermutation, MixedOrder

SIZES, SEEDS = st.integers(1, 300), st.integers(0, 2**31)


def one_file(size: int, shuffle: bool, seed: int) -> MixedOrder:
    return MixedOrder([size], [1.0], shuffle, seed)


@given(SIZES, SEEDS, st.booleans())
def test_every_epoch_uses_every_row_once(size: int, seed: int, shuffle: bool) -> None:
    order = one_file(size, shuffle, seed)
    for epoch in range(3):
        assert sorted(order.row(epoch * size + place) for place in range(size)) == list(range(size))


@given(SIZES, SEEDS, st.lists(st.integers(0, 200), max_size=20))
def test_a_row_does_not_depend_on_what_was_asked_before(size: int, seed: int, numbers: list[int]) -> None:
    order = one_file(size, True, seed)
    assert [order.row(number) for number in numbers] == [one_file(size, True, seed).row(number) for number in numbers]


def test_without_shuffling_rows_come_in_file_order() -> None:
    order = one_file(3, False, 1)
    assert [order.row(number) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_and_seeds_differ() -> None:
    rows = [tuple(one_file(20, True, seed).row(epoch * 20 + place) for place in range(20)) for seed in (1, 5) for epoch in range(2)]
    assert len({*rows, tuple(range(20))}) == 5


def test_orders_are_what_they_always_were() -> None:
    # a run resumed under a newer version continues with the prompts that it would have had
    assert [one_file(10, True, 42).row(number) for number in range(12)] == [8, 7, 2, 4, 5, 0, 9, 6, 1, 3, 2, 3]
    assert [FeistelPermutation(1 << 40, 7)[place] for place in range(3)] == [227134629944, 944323139396, 358413424437]


@given(SIZES, SIZES, SEEDS, st.booleans(), st.integers(0, 200))
def test_files_of_weight_one_are_one_file(first: int, second: int, seed: int, shuffle: bool, number: int) -> None:
    mixed = MixedOrder([first, second], [1.0, 1.0], shuffle, seed)
    assert mixed.row(number) == one_file(first + second, shuffle, seed).row(number)


FILES = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 2.75])), min_size=1, max_size=4)


def mixed_order(files: list[tuple[int, float]], shuffle: bool, seed: int) -> MixedOrder:
    sizes, weights = [size for size, _ in files], [weight for _, weight in files]
    assume(any(sizes) and all(round(size * weight) or not size for size, weight in files))
    return MixedOrder(sizes, weights, shuffle, seed)


@given(FILES, st.booleans(), SEEDS)
def test_an_epoch_holds_of_each_file_what_its_weight_says(files: list[tuple[int, float]], shuffle: bool, seed: int) -> None:
    order = mixed_order(files, shuffle, seed)
    drawn: Counter[int] = Counter()
    for epoch in range(4):
        rows = [order.row(epoch * order.epoch_size + place) for place in range(order.epoch_size)]
        drawn.update(rows)
        first = 0
        for size, weight in files:
            assert sum(first <= row < first + size for row in rows) == round(size * weight)
            times = [drawn[row] for row in range(first, first + size)]
            assert not times or max(times) - min(times) <= 1, "each of a file as often as the others, to within one"
            first += size


@given(FILES, SEEDS, st.lists(st.integers(0, 200), max_size=20))
def test_a_mixed_order_goes_on_at_any_number(files: list[tuple[int, float]], seed: int, numbers: list[int]) -> None:
    order = mixed_order(files, True, seed)
    assert [order.row(number) for number in numbers] == [mixed_order(files, True, seed).row(number) for number in numbers]


def test_half_of_a_file_is_followed_by_its_other_half() -> None:
    order = MixedOrder([4, 2], [0.5, 1.0], False, 1)
    assert [order.row(number) for number in range(12)] == [0, 1, 4, 5, 2, 3, 4, 5, 0, 1, 4, 5]


def test_a_weight_that_draws_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the weight 0\.1 of 3 prompts rounds to none"):
        MixedOrder([3], [0.1], False, 1)
