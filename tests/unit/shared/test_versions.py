"""The one rule of steps and versions, against its definition step by step."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.schema.versions import admissible_steps, crossed, is_periodic, is_pushed, version_after

TOTALS, INTERVALS = st.integers(1, 60), st.integers(1, 9)


@given(TOTALS, INTERVALS)
def test_versions_count_the_pushes(total: int, interval: int) -> None:
    version = 0
    assert version_after(0, interval, total) == 0
    for steps in range(1, total + 1):
        version += is_pushed(steps, interval, total)
        assert version_after(steps, interval, total) == version


@given(TOTALS, INTERVALS)
def test_a_push_follows_every_interval_and_the_last_step(total: int, interval: int) -> None:
    pushed = [steps for steps in range(1, total + 1) if is_pushed(steps, interval, total)]
    assert pushed == sorted({*range(interval, total + 1, interval), total})


@given(TOTALS, INTERVALS, st.integers(0, 60), st.integers(0, 5))
def test_admission_is_for_exactly_the_steps_within_the_bound(total: int, interval: int, live: int, max_staleness: int) -> None:
    within = [step for step in range(total) if step // interval <= live + max_staleness]
    assert admissible_steps(live, max_staleness, interval, total) == len(within)


@given(st.sets(st.integers(0, 200)), INTERVALS, st.one_of(st.none(), INTERVALS))
def test_a_count_that_jumps_loses_nothing_that_is_due_and_does_nothing_twice(
    counts: set[int], interval: int, per_epoch: int | None
) -> None:
    seen = sorted({0, *counts})
    due = [steps for steps in range(1, seen[-1] + 1) if steps % interval == 0 or (per_epoch is not None and steps % per_epoch == 0)]
    fired = [(before, now) for before, now in pairwise(seen) if crossed(before, now, interval, per_epoch)]
    assert fired == [(before, now) for before, now in pairwise(seen) if any(before < steps <= now for steps in due)]
    one_by_one = range(1, seen[-1] + 1)
    assert [steps for steps in one_by_one if crossed(steps - 1, steps, interval, per_epoch)] == due
    assert [steps for steps in one_by_one if is_periodic(steps, interval, per_epoch)] == due
