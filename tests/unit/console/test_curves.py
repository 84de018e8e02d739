"""Curves keep spikes, gaps and the newest of what was written twice, however many steps there are."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console.pages.run import curve, extremes
from shared.view.metric_history import MOST_TAGS, MetricHistory, MetricSeries, moving_mean


def series(values: dict[int, float], at: dict[int, float] | None = None) -> MetricSeries:
    found = MetricSeries()
    for step, value in values.items():
        found.put(step, value, (at or {}).get(step, float(step)))
    return found


def test_a_spike_of_one_step_among_many_is_seen() -> None:
    long = series({step: 1000.0 if step == 77_777 else step % 7 for step in range(100_000)})
    found = curve("r", "t", long, points=200)
    assert len(found.x) <= 202 and found.total == 100_000 and max(value for value in found.values if value is not None) == 1000.0
    assert found.steps[0] == 0 and found.steps[-1] == 99_999 and found.steps == sorted(found.steps)
    near = curve("r", "t", long, first=77_770, last=77_790, points=200)
    assert near.steps == list(range(77_770, 77_791)), "a part of it has every step"


def test_values_that_are_no_numbers_leave_gaps_and_are_told() -> None:
    found = curve("r", "t", series({0: 1.0, 1: math.nan, 2: math.inf, 3: -math.inf, 4: 3.0}), window=2)
    assert found.values == [1.0, None, None, None, 3.0] and found.smoothed == [1.0, 1.0, None, None, 3.0]
    assert [(item.step, item.value) for item in found.unusual] == [(1, "nan"), (2, "inf"), (3, "-inf")] and found.unusual_total == 3
    assert found.newest == 3.0 and curve("r", "t", series({0: math.nan})).newest is None


def test_a_step_that_was_trained_again_counts_as_it_was_written_last() -> None:
    found = series({step: 1.0 for step in range(5)})
    assert found.put(3, 2.0, 10.0) and found.put(4, 2.0, 11.0)
    assert not found.put(4, 9.0, 3.5), "an older file is read after a newer event"
    assert found.values.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0] and found.steps.tolist() == [0, 1, 2, 3, 4]


def test_hours_since_the_run_began_ascend_even_if_early_steps_were_made_again() -> None:
    found = curve("r", "t", series({0: 0.0, 1: 1.0, 2: 2.0}, at={0: 3600.0, 1: 14400.0, 2: 7200.0}), began=0.0, first=1.5)
    assert found.x == [2.0, 4.0] and found.steps == [2, 1] and found.values == [2.0, 1.0]


def test_a_huge_value_spoils_no_mean_but_those_that_it_is_in() -> None:
    assert moving_mean(np.array([1e300, 1.0, 2.0, 3.0]), 2).tolist()[2:] == [1.5, 2.5]
    assert moving_mean(np.array([1.0]), 50).tolist() == [1.0] and moving_mean(np.array([]), 5).tolist() == []


@given(st.lists(st.floats(), max_size=300), st.integers(10, 50))
def test_extremes_are_few_ascending_and_hold_the_ends_and_the_greatest(values: list[float], points: int) -> None:
    array = np.array(values, dtype=np.float64)
    chosen = extremes(array, points)
    assert len(chosen) <= points + 4 and np.all(np.diff(chosen) > 0)
    if values:
        assert chosen[0] == 0 and chosen[-1] == len(values) - 1
    finite = array[np.isfinite(array)]
    if len(finite):
        kept = array[chosen]
        assert np.nanmax(kept[np.isfinite(kept)]) == finite.max() and np.nanmin(kept[np.isfinite(kept)]) == finite.min()


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=60), st.integers(2, 80))
def test_the_moving_mean_is_that_of_the_numbers_in_its_window(values: list[float], window: int) -> None:
    for index, mean in enumerate(moving_mean(np.array(values), window)):
        part = [value for value in values[max(0, index + 1 - window) : index + 1] if not math.isnan(value)]
        assert mean == pytest.approx(np.mean(part), rel=1e-9, abs=1e-6) if part else math.isnan(mean)


def test_a_history_keeps_so_many_metrics_and_says_how_many_more_there_were() -> None:
    history = MetricHistory()
    for index in range(MOST_TAGS + 3):
        history.put(f"rewards/{index}/mean", 0, 1.0, 0.0)
    assert len(history.series) == MOST_TAGS and history.left_out == 3
    assert not history.put("rewards/0/mean", -1, 1.0, 0.0) and not history.put("rewards/0/mean", 2**40, 1.0, 0.0)


def test_times_lie_between_the_steps_that_were_written_around_them() -> None:
    history = MetricHistory()
    assert history.step_at(np.array([5.0])).tolist() == [0.0]
    for step in range(4):
        history.put("train/loss", step, 0.0, 100.0 + 10 * step)
    assert history.step_at(np.array([0.0, 105.0, 120.0, 999.0])).tolist() == [0.0, 0.5, 2.0, 3.0]
