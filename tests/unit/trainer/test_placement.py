"""Which sample goes where: the invariants of the placement, drawn at random."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.partition import MAX_IMBALANCE, SampleTooLong, balance, differencing

many = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
lengths_and_budget = st.integers(1, 60).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), min_size=1, max_size=40), st.just(budget))
)


@many
@given(batch=lengths_and_budget, dp_size=st.integers(1, 9), data=st.data())
def test_invariants(batch, dp_size, data):
    lengths, budget = batch
    costs = data.draw(st.none() | st.lists(st.floats(0.1, 1e6), min_size=len(lengths), max_size=len(lengths)), label="costs")
    placement = balance(lengths, dp_size, budget, costs=costs)
    micro_batches = list(itertools.chain.from_iterable(placement))
    assert len(placement) == dp_size
    assert len({len(rank) for rank in placement}) == 1
    assert sorted(itertools.chain.from_iterable(micro_batches)) == list(range(len(lengths)))
    assert all(indexes == sorted(indexes) for indexes in micro_batches)
    assert all(sum(lengths[i] for i in indexes) <= budget for indexes in micro_batches)
    assert sum(not indexes for indexes in micro_batches) == max(0, len(micro_batches) - len(lengths))
    assert placement == balance(list(lengths), dp_size, budget, costs=costs)

    costs = [float(length) for length in lengths] if costs is None else costs
    of_bins = [sum(costs[i] for i in indexes) for indexes in micro_batches]
    of_ranks = [sum(sum(costs[i] for i in indexes) for indexes in rank) for rank in placement]
    assert max(of_ranks) - min(of_ranks) <= (max(of_bins) - min(of_bins)) * (1 + 1e-9) + 1e-6
    for at_once, next_at_once in itertools.pairwise(zip(*placement, strict=True)):  # dearest first
        assert min(sum(costs[i] for i in m) for m in at_once) >= max(sum(costs[i] for i in m) for m in next_at_once) - 1e-6


@many
@given(batch=lengths_and_budget, dp_size=st.integers(1, 5), data=st.data())
def test_units_stay_whole_or_are_placed_as_if_there_were_none(batch, dp_size, data):
    lengths, budget = batch
    units = data.draw(st.lists(st.integers(0, 12), min_size=len(lengths), max_size=len(lengths)), label="units")
    placement = balance(lengths, dp_size, budget, units=units)
    assert len({len(rank) for rank in placement}) == 1
    assert sorted(i for rank in placement for bin in rank for i in bin) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin) <= budget for rank in placement for bin in rank)
    ranks_of = {unit: {rank for rank in range(dp_size) for bin in placement[rank] for i in bin if units[i] == unit} for unit in units}
    if any(len(ranks) > 1 for ranks in ranks_of.values()):
        assert placement == balance(lengths, dp_size, budget)
    else:
        work = [sum(lengths[i] for bin in rank for i in bin) for rank in placement]
        assert max(work) <= (1 + MAX_IMBALANCE) * sum(lengths) / dp_size or placement == balance(lengths, dp_size, budget)


def test_units_stay_whole_where_that_costs_nothing():
    placement = balance([10, 20, 30, 10, 20, 10], 2, 30, units="abbaca")  # 30, 50 and 20
    assert [sorted(i for bin in rank for i in bin) for rank in placement] == [[0, 3, 4, 5], [1, 2]]


def test_a_unit_that_outweighs_the_others_is_taken_apart():
    placement = balance([10] * 6, 2, 40, units="aaaaab")
    assert [sum(len(bin) for bin in rank) for rank in placement] == [3, 3]


@many
@given(batch=lengths_and_budget, dp_size=st.integers(1, 4))
def test_with_fewer_micro_batches_differencing_would_exceed_the_budget(batch, dp_size):
    lengths, budget = batch
    for count in range(1, len(balance(lengths, dp_size, budget)[0])):
        placed = differencing([float(length) for length in lengths], dp_size * count)
        assert max(sum(lengths[i] for i in members) for members in placed) > budget


@many
@given(costs=st.lists(st.floats(0.1, 1e3), max_size=40), bins=st.integers(1, 12))
def test_differencing_splits_evenly(costs, bins):
    placed = differencing(costs, bins)
    assert len(placed) == bins
    assert sorted(itertools.chain.from_iterable(placed)) == list(range(len(costs)))
    assert sum(not members for members in placed) == max(0, bins - len(costs))
    totals = [sum(costs[i] for i in members) for members in placed]
    assert max(totals) - min(totals) <= max(costs, default=0.0) + 1e-6


def test_differencing_by_hand():
    # Karmarkar and Karp's own: 8 7 | 6 5 4 -> differences 1, 1 -> 4 - 1 - 1 = 2, and so 16 against 14
    placed = differencing([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in members) for members in placed) == [14, 16]


def test_one_token_over_the_budget_is_too_many():
    # two bins would do (8 + 7 and 6 + 5 + 4), but differencing makes them 16 and 14
    (micro_batches,) = balance([8, 7, 6, 5, 4], dp_size=1, max_tokens_per_rank=15)
    assert len(micro_batches) == 3
    (micro_batches,) = balance([8, 7, 6, 5, 4], dp_size=1, max_tokens_per_rank=16)
    assert len(micro_batches) == 2


def test_rows_are_dealt_back_and_forth():
    # eight samples that each fill a bin, dearest first: 80 70 | 50 60 | 40 30 | 10 20
    lengths = [80, 70, 60, 50, 40, 30, 20, 10]
    placement = balance([80] * 8, dp_size=2, max_tokens_per_rank=80, costs=lengths)
    assert [[lengths[i] for (i,) in rank] for rank in placement] == [[80, 50, 40, 10], [70, 60, 30, 20]]


def test_one_deep_set_of_many_samples():
    assert differencing([1.0] * 20_000, 1) == [list(range(20_000))]


def test_even_work_is_dealt_evenly():
    placement = balance([100] * 64, dp_size=4, max_tokens_per_rank=400)
    assert [[len(indexes) for indexes in rank] for rank in placement] == [[4] * 4] * 4


def test_fewer_samples_than_ranks_leave_empty_micro_batches():
    assert balance([5, 9], dp_size=4, max_tokens_per_rank=10) == [[[1]], [[0]], [[]], [[]]]


def test_a_sample_over_the_budget_is_refused_with_its_numbers():
    with pytest.raises(SampleTooLong, match="number 1 of the batch has 11 tokens, a micro-batch holds at most 10"):
        balance([5, 11], 1, 10)
    assert balance([5, 10], 1, 10) == [[[1], [0]]]


@many
@given(batch=lengths_and_budget, dp_size=st.integers(1, 4), data=st.data())
def test_units_that_are_kept_closely_take_no_more_micro_batches(batch, dp_size, data):
    lengths, budget = batch
    units = sorted(data.draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)), label="units"))
    loose, close = (balance(lengths, dp_size, budget, units=units, whole_groups=whole_groups) for whole_groups in (False, True))
    assert [len(rank) for rank in close] == [len(rank) for rank in loose]
    assert [sorted(itertools.chain.from_iterable(rank)) for rank in close] == [
        sorted(itertools.chain.from_iterable(rank)) for rank in loose
    ]
    assert all(sum(lengths[i] for i in bin) <= budget for rank in close for bin in rank)
    assert all(bin == sorted(bin) for rank in close for bin in rank)
    assert sum(not bin for rank in close for bin in rank) <= sum(not bin for rank in loose for bin in rank)


def test_units_are_kept_closely_whole_or_in_large_pieces():
    lengths, units = [9, 10, 11, 10] * 4, [unit for unit in "abcd" for _ in range(4)]
    (close,) = balance(lengths, 1, 45, units=units, whole_groups=True)
    assert [[units[i] for i in bin] for bin in close] == [[unit] * 4 for unit in "abcd"]
    (close,) = balance([10] * 16, 1, 20, units=units, whole_groups=True)
    assert sorted(sorted({units[i] for i in bin}) for bin in close) == [[unit] for unit in "aabbccdd"], "a unit in two pieces"
    (loose,) = balance([10] * 16, 1, 20, units=units)
    assert any(len({units[i] for i in bin}) > 1 for bin in loose)
