"""The waits between the lives of a process that keeps dying."""

from hypothesis import given
from hypothesis import strategies as st

from myxo.launch.supervisor import BackOff


def test_waits_double_up_to_the_longest() -> None:
    backoff = BackOff()
    waits = [backoff.died(lived=1.0, ready=True) for _ in range(9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_healthy_life_forgives() -> None:
    backoff = BackOff()
    for _ in range(5):
        backoff.died(lived=1.0, ready=True)
    assert backoff.died(lived=BackOff.healthy, ready=True) == BackOff.first
    assert backoff.died(lived=1.0, ready=True) == 2 * BackOff.first


def test_gives_up_on_what_never_gets_ready() -> None:
    backoff = BackOff()
    waits = [backoff.died(lived=1.0, ready=False) for _ in range(BackOff.most)]
    assert None not in waits[:-1]
    assert waits[-1] is None


def test_one_ready_life_starts_the_count_anew() -> None:
    backoff = BackOff()
    for _ in range(BackOff.most - 1):
        backoff.died(lived=1.0, ready=False)
    assert backoff.died(lived=1.0, ready=True) is not None
    assert backoff.deaths_unready == 0


def test_long_lives_that_never_get_ready_are_given_up_too() -> None:
    """An engine that fails after minutes of loading is as hopeless as one that fails at once."""
    backoff = BackOff()
    waits = [backoff.died(lived=10 * BackOff.healthy, ready=False) for _ in range(BackOff.most)]
    assert waits == [BackOff.first] * (BackOff.most - 1) + [None]


def test_servers_come_back_at_once_the_first_time() -> None:
    backoff = BackOff(at_once=True)
    assert [backoff.died(lived=1.0, ready=True) for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=60))
def test_waits_stay_within_their_bounds(deaths: list[tuple[float, bool]]) -> None:
    backoff, unready = BackOff(), 0
    for lived, ready in deaths:
        wait = backoff.died(lived, ready)
        unready = 0 if ready else unready + 1
        assert (wait is None) == (unready >= BackOff.most)
        if wait is not None:
            assert BackOff.first <= wait <= BackOff.longest
            if lived >= BackOff.healthy:
                assert wait == BackOff.first
