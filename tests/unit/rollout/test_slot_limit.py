"""Slots by an engine's load: more while they make it faster, fewer once its memory is full."""

from collections.abc import Callable

from services.rollout.engine.transport import parse_load
from services.rollout.request_slots import (
    CALM_READINGS,
    MEASURED,
    MOST,
    QUEUED_READINGS,
    SETTLING,
    START,
    DeliveryPace,
    EngineLoad,
    SlotLimit,
    lot,
)


class Driven:
    """A limit and an engine that runs what it is given, as fast as ``speed`` says."""

    def __init__(self, limit: SlotLimit, speed: Callable[[int], float]) -> None:
        self.limit, self._speed, self._tokens, self._now = limit, speed, 0.0, 0.0

    def read(self, seconds: int, usage: float = 0.2) -> int:
        """Returns the slots after so many readings, with all of them held."""
        for _ in range(seconds):
            slots = self.limit.slots
            self._tokens, self._now = self._tokens + self._speed(slots), self._now + 1
            self.limit.note(EngineLoad(slots, 0, usage), slots, int(self._tokens), self._now)
        return self.limit.slots


def saturating(running: int) -> float:
    """Tokens a second of an engine that 600 requests saturate."""
    return 100.0 * min(running, 600)


def test_slots_grow_while_they_make_the_engine_faster() -> None:
    driven = Driven(SlotLimit(None, least=8), saturating)
    assert driven.read(SETTLING + MEASURED - 1) == START
    assert driven.read(1) == START * 5 // 4 + 1
    assert 480 < driven.read(300) < 800, "a quarter more of what saturates it is given back"
    assert Driven(SlotLimit(None, least=8), lambda running: 100.0 * running).read(300) == MOST


def test_slots_that_make_it_no_faster_are_given_back_and_tried_again_later() -> None:
    driven = Driven(SlotLimit(None, least=8), lambda running: 5000.0)
    seen = [driven.read(1) for _ in range(100)]
    assert set(seen) == {START, START * 5 // 4 + 1}
    assert seen.count(START) > 80
    assert seen[-30:].count(START * 5 // 4 + 1) > 0, "the engine may have become faster"


def test_slots_stay_where_not_all_are_used_or_memory_is_nearly_full() -> None:
    limit = SlotLimit(None, least=8)
    assert {limit.note(EngineLoad(START, 0, 0.2), START - lot(START), 1000 * now, now) for now in range(99)} == {START}
    assert SlotLimit(None, least=8).note(EngineLoad(START, 0, 0.2), START, 0, 0.0) == START
    assert Driven(SlotLimit(None, least=8), saturating).read(99, usage=0.95) == START, "the running ones will need the rest"


def test_a_batch_has_slots_from_the_beginning() -> None:
    assert SlotLimit(None, least=8, batch=1024).slots == 1024
    assert SlotLimit(None, least=8, batch=64).slots == START
    assert SlotLimit(None, least=8, batch=2 * MOST).slots == MOST


def test_requests_that_wait_in_the_engine_for_long_lower_the_limit() -> None:
    limit = SlotLimit(None, least=8)
    load = EngineLoad(running=40, queued=216, kv_usage=0.99)
    slots = [limit.note(load, START, 0, now) for now in range(QUEUED_READINGS)]
    assert slots[:-1] == [START] * (QUEUED_READINGS - 1), "a burst of new requests has to be computed first"
    assert 40 < slots[-1] <= 46
    assert limit.note(EngineLoad(40, 4, 0.5), 45, 0, 9.0) == slots[-1], "one in eight keeps the engine busy"


def test_a_retraction_lowers_the_limit_and_keeps_it_low_for_a_while() -> None:
    limit = SlotLimit(None, least=8)
    limit.note(EngineLoad(200, 0, 0.5, retracted=7), START - 1, 0, 0.0)
    lowered = limit.note(EngineLoad(100, 0, 0.97, retracted=9), 100, 0, 1.0)
    assert lowered == 90
    after = CALM_READINGS + SETTLING + MEASURED - 1
    later = [limit.note(EngineLoad(lowered, 0, 0.5, retracted=9), lowered, 100 * now, now) for now in range(2, 2 + after)]
    assert later[:-1] == [lowered] * (after - 1)
    assert later[-1] > lowered


def test_a_new_engines_count_is_no_retraction_and_a_group_fits_always() -> None:
    limit = SlotLimit(None, least=8)
    limit.note(EngineLoad(100, 0, 0.5, retracted=3), 0, 0, 0.0)
    limit.renew()
    assert limit.note(EngineLoad(1, 0, 0.1, retracted=1), 0, 0, 1.0) == START
    assert limit.note(EngineLoad(1, 0, 1.0, retracted=2), START, 0, 2.0) == 8


def test_slots_that_the_run_names_follow_nothing() -> None:
    limit = SlotLimit(5, least=8)
    assert limit.note(EngineLoad(5, 99, 1.0, retracted=9), 5, 0, 0.0) == limit.slots == 5


PAGE = """
# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 31.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",priority="1"} 30.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 4.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.25
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0",dp_rank="1"} 0.5
sglang:num_retracted_requests_total{engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:num_running_reqs_offline_batch{engine_type="unified",model_name="m"} 9.0
"""


def test_an_engines_page_tells_its_load() -> None:
    assert parse_load(PAGE) == EngineLoad(running=31, queued=4, kv_usage=0.5, retracted=2)
    assert parse_load('sglang:realtime_tokens_total{mode="decode"} 5\n') is None


def test_a_replica_that_is_too_slow_for_its_staleness_takes_one_group_at_a_time() -> None:
    pace = DeliveryPace(max_staleness=1)
    assert pace.room(8, 0, 5) == 8  # nothing is known yet
    for version in range(4):
        pace.note_live(version, 10.0 * version)
        pace.note_live(version, 10.0 * version + 3)  # no news
    pace.note_group(12.0)
    assert (pace.version_s, pace.staleness(3), pace.room(8, 3, 5)) == (10.0, 1, 8)
    assert (pace.staleness(2), pace.room(8, 2, 5), pace.room(8, 2, 0), pace.room(0, 2, 0)) == (2, 0, 1, 0)  # it serves one behind
    for _ in range(64):
        pace.note_group(35.0)
    assert (pace.staleness(3), pace.room(8, 3, 1)) == (3, 0)
    for _ in range(64):
        pace.note_group(5.0)
    assert pace.room(8, 3, 5) == 8
