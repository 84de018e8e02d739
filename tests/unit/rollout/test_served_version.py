"""What a replica serves, event by event: never a version whose bytes may have changed, and never two at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.served_version import NO_WEIGHTS, ServedVersion
from shared.bus.registry import CATCHING_UP


@pytest.fixture
def ready() -> ServedVersion:
    """A replica that serves version 3."""
    served = ServedVersion()
    served.engine_started()
    served.serve(3, "03")
    return served


def test_a_new_engine_is_fenced_until_a_version_is_served() -> None:
    served = ServedVersion()
    assert (served.state, served.serving) == ("starting", False)
    served.engine_started()
    assert (served.state, served.serving, served.incarnation) == ("fenced", False, 1)
    served.serve(3, "03")
    assert (served.state, served.serving, served.version, served.digest) == ("ready", True, 3, "03")


def test_nothing_is_served_while_a_version_is_loaded(ready: ServedVersion) -> None:
    ready.begin_update(4)
    assert (ready.state, ready.serving, ready.version, ready.touched) == ("updating", False, 3, False)
    ready.loaded("04")
    assert (ready.received, ready.touched, ready.serving) == ("04", True, False)
    ready.serve(4, "04")
    assert (ready.state, ready.version, ready.target, ready.touched) == ("ready", 4, None, False)


def test_a_check_that_finds_a_difference_takes_the_digest_back(ready: ServedVersion) -> None:
    ready.begin_update(4)
    ready.loaded("04")
    ready.compared("04", differs=False)
    assert ready.received == "04"
    ready.compared("05", differs=True)
    assert ready.received == "" and ready.touched


def test_a_fence_takes_the_weights_and_what_was_reported_of_them(ready: ServedVersion) -> None:
    before = ready.incarnation
    ready.fence()
    assert (ready.state, ready.version, ready.digest) == ("fenced", NO_WEIGHTS, "") and ready.incarnation > before
    ready.engine_died()
    assert ready.state == "starting"


def test_what_was_held_is_served_again_after_sleep_unless_it_went_with_the_memory(ready: ServedVersion) -> None:
    ready.asleep = True
    assert (ready.state, ready.serving) == ("asleep", False)
    ready.asleep = False
    assert ready.serving and ready.version == 3
    ready.asleep = True
    ready.lose_weights()
    ready.asleep = False
    assert (ready.state, ready.serving) == ("fenced", False)


def test_a_newcomer_that_helps_itself_says_so() -> None:
    served = ServedVersion()
    served.engine_started()
    served.catching_up = True
    assert (served.state, served.serving) == (CATCHING_UP, False)


EVENTS = ["engine_started", "engine_died", "fence", "lose_weights", "begin_update", "loaded", "serve", "sleep", "wake"]


@given(st.lists(st.sampled_from(EVENTS)))
def test_only_a_whole_version_of_a_living_engine_is_ever_served(events: list[str]) -> None:
    served, version, incarnation = ServedVersion(), 0, 0
    for event in events:
        match event:
            case "begin_update":
                version += 1
                served.begin_update(version)
            case "loaded":
                served.loaded("d")
            case "serve":
                served.serve(version, "d")
            case "sleep" | "wake":
                served.asleep = event == "sleep"
            case _:
                getattr(served, event)()
        assert served.incarnation >= incarnation
        incarnation = served.incarnation
        if served.serving:
            assert served.state in ("ready", CATCHING_UP) and served.target is None and served.version != NO_WEIGHTS
            assert served.engine_is_up and not served.asleep
