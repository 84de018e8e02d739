"""The lease's decisions about time: who has the lease may act until, and who waits may take it from."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.leader_lease import LeaseObserver, LeaseTiming

TIMING = LeaseTiming(5.0)


def test_a_holder_renews_several_times_before_it_must_stop() -> None:
    assert TIMING.acts_until(100.0) == 100.0 + TIMING.duration - TIMING.margin
    assert 2 * TIMING.renewal < TIMING.duration - TIMING.margin


def test_a_revision_must_stand_for_the_whole_duration() -> None:
    observer = LeaseObserver(6.0)
    assert not observer.see(4, 100.0)
    assert not observer.see(4, 105.9)
    assert observer.see(4, 106.0)
    assert observer.see(4, 107.0)


def test_a_renewal_starts_the_count_anew() -> None:
    observer = LeaseObserver(6.0)
    observer.see(4, 100.0)
    assert not observer.see(5, 105.0)
    assert not observer.see(5, 110.9)
    assert observer.see(5, 111.0)
    assert not observer.see(4, 112.0), "a server that has lost what it had is no reason to take over"


def test_time_in_which_the_lease_could_not_be_read_does_not_count() -> None:
    observer = LeaseObserver(6.0)
    observer.see(4, 100.0)
    observer.unreadable()
    assert not observer.see(4, 107.0)
    assert observer.see(4, 113.0)


@dataclass
class Try:
    """A message to the server and its answer: seconds before it is sent, on the way there, on the way back; whether the answer is lost."""

    pause: float
    there: float
    back: float
    lost: bool


SECONDS = st.one_of(st.floats(0, 0.5), st.floats(0, 10))
TRIES = st.lists(st.builds(Try, SECONDS, SECONDS, SECONDS, st.booleans()), max_size=40)


@given(holder=TRIES, waiter=TRIES, offset=st.floats(-1000, 1000))
def test_whatever_is_late_or_lost_nobody_takes_the_lease_from_one_who_acts(holder: list[Try], waiter: list[Try], offset: float) -> None:
    """The holder renews and the waiter looks and takes, each at its own pace and by its own clock, through one server."""
    revision = known = 1
    until = TIMING.acts_until(0.0)
    observer, wanted = LeaseObserver(TIMING.duration), None
    now = {"holder": 0.0, "waiter": 0.0}
    left = {"holder": list(holder), "waiter": list(waiter)}
    while left["holder"] and left["waiter"]:
        who = min(left, key=lambda one: now[one] + left[one][0].pause + left[one][0].there)  # whose message the server stores next
        one = left[who].pop(0)
        sent = now[who] + one.pause
        stored = sent + one.there
        now[who] = stored + one.back
        if who == "holder":
            renewed = known == revision
            revision += renewed
            if renewed and not one.lost:
                known, until = revision, max(until, TIMING.acts_until(sent))
            elif not renewed:
                known = revision  # it reads what is there: its own
        elif wanted is not None:
            if wanted == revision:
                assert stored >= until + TIMING.margin - 1e-6
                return
            wanted = None
        elif one.lost:
            observer.unreadable()
        elif observer.see(revision, now[who] + offset):
            wanted = revision


@pytest.mark.parametrize("duration", [2.0, 6.0, 60.0])
def test_every_part_of_a_timing_follows_its_duration(duration: float) -> None:
    timing = LeaseTiming(duration)
    assert timing.renewal + timing.attempt < timing.acts_until(0.0) < duration
