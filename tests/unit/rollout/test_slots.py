"""Slots: how many, and who gets them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine.transport import parse_load
from services.rollout.request_slots import (
    CALM_READINGS,
    LOTS,
    MEASURED,
    MOST,
    QUEUED_READINGS,
    SETTLING,
    START,
    DeliveryPace,
    EngineLoad,
    GroupSlots,
    RequestSlots,
    SlotLimit,
    SlotWaiter,
    lot,
)
from shared.bus.subjects import EVAL, TRAIN


def nothing() -> None:
    """Wakes nobody."""


def slots(limit: int, samples: int = 1, trains: bool = True) -> RequestSlots:
    """Returns so many slots, for groups of so many samples."""
    return RequestSlots(SlotLimit(limit, samples), samples, trains)


def resize(queue: RequestSlots, limit: int) -> None:
    queue._limit.slots = limit
    queue.grant()


def asked(queue: RequestSlots, claim: GroupSlots, samples: int) -> list[SlotWaiter]:
    return [queue.ask(claim, index, nothing) for index in range(samples)]


def test_a_slot_that_a_short_sample_leaves_goes_to_the_next_group() -> None:
    queue = slots(4, 4)
    first, second = queue.take(TRAIN, 4), queue.take(TRAIN, 4)
    running, waiting = asked(queue, first, 4), asked(queue, second, 4)
    assert [waiter.granted for waiter in (*running, *waiting)] == [True] * 4 + [False] * 4
    assert queue.room(TRAIN) == 0
    first.open -= 1
    queue.leave(running[2])
    assert [waiter.granted for waiter in waiting] == [True, False, False, False]


def test_groups_are_taken_for_as_many_samples_as_have_ended() -> None:
    queue = slots(8, 4)
    claim = queue.take(TRAIN, 8)
    assert queue.room(TRAIN) == 0
    claim.open -= 1
    assert queue.room(TRAIN) == 1, "a group begins although only one of its samples has a slot"
    queue.take(TRAIN, 4)
    assert queue.room(TRAIN) == 0, "not a second one, until that one is begun"
    claim.open -= 7
    assert queue.room(TRAIN) == 1
    claim.close()
    assert queue.room(TRAIN) == 1, "it had nothing open"


def test_an_interrupted_sample_comes_before_groups_that_were_taken_later() -> None:
    queue = slots(1)
    old, new = queue.take(TRAIN, 1), queue.take(TRAIN, 1)
    [running] = asked(queue, old, 1)
    [waiting] = asked(queue, new, 1)
    again = queue.ask(old, 0, nothing)
    queue.leave(running)
    assert (again.granted, waiting.granted) == (True, False)


def test_evaluations_have_half_of_the_slots_and_come_first() -> None:
    queue = slots(4)
    training = asked(queue, queue.take(TRAIN, 8), 8)
    assert queue.room(EVAL) == 2, "they are taken although training has all slots"
    evaluating = asked(queue, queue.take(EVAL, 3), 3)
    for waiter in training[:3]:
        queue.leave(waiter)
    assert [waiter.granted for waiter in evaluating] == [True, True, False]
    assert sum(waiter.granted and not waiter.left for waiter in training) == 2
    alone = slots(4, trains=False)
    assert alone.room(EVAL) == 4


def test_many_slots_that_were_left_are_filled_a_lot_at_a_time() -> None:
    queue = slots(4 * LOTS)
    waiters = asked(queue, queue.take(TRAIN, 6 * LOTS), 6 * LOTS)
    running, waiting = waiters[: 4 * LOTS], waiters[4 * LOTS :]
    assert all(waiter.granted for waiter in running)
    for waiter in running[:3]:
        queue.leave(waiter)
    assert not any(waiter.granted for waiter in waiting), "three of four are no lot"
    queue.leave(running[3])
    assert [waiter.granted for waiter in waiting[:5]] == [True] * 4 + [False]
    queue.leave(running[4])
    resize(queue, 4 * LOTS + 3)
    assert [waiter.granted for waiter in waiting[4:9]] == [True] * 4 + [False], "slots that are new count like those that were left"


def test_slots_are_given_at_once_while_nobody_has_had_to_wait() -> None:
    queue = slots(4 * LOTS)
    claim = queue.take(TRAIN, 4 * LOTS)
    running = asked(queue, claim, 4 * LOTS - 1)
    queue.leave(running[0])
    assert queue.ask(claim, 0, nothing).granted and queue.ask(claim, 1, nothing).granted
    queue.leave(running[1])
    again = queue.ask(claim, 2, nothing)
    assert not again.granted, "all were held before it"
    for waiter in running[2:5]:
        queue.leave(waiter)
    assert again.granted


def test_a_lowered_limit_grants_nothing_until_enough_have_left() -> None:
    queue = slots(3)
    waiters = asked(queue, queue.take(TRAIN, 5), 5)
    resize(queue, 2)
    queue.leave(waiters[0])
    assert not waiters[3].granted
    queue.leave(waiters[1])
    assert waiters[3].granted
    resize(queue, 3)
    assert waiters[4].granted


@dataclass
class Model:
    """A queue under any sequence of steps, with what it has granted."""

    queue: RequestSlots
    groups: list[tuple[GroupSlots, list[SlotWaiter]]] = field(default_factory=list)

    def take(self, task_class: str, samples: int) -> None:
        self.queue._samples = samples
        for _ in range(self.queue.room(task_class)):
            claim = self.queue.take(task_class, samples)
            self.groups.append((claim, asked(self.queue, claim, samples)))

    def end(self, pick: int) -> None:
        """A sample ends; with the last one its group is no longer in hand."""
        at_work = [(claim, waiters) for claim, waiters in self.groups if any(one.granted and not one.left for one in waiters)]
        if at_work:
            claim, waiters = at_work[pick % len(at_work)]
            claim.open -= 1
            self.queue.leave(next(one for one in waiters if one.granted and not one.left))
            if claim.open == 0:
                self.drop(claim, waiters)

    def cancel(self, pick: int) -> None:
        """A group is cancelled, waiting and running samples alike."""
        if self.groups:
            self.drop(*self.groups[pick % len(self.groups)])

    def drop(self, claim: GroupSlots, waiters: list[SlotWaiter]) -> None:
        for waiter in waiters:
            self.queue.leave(waiter)
        claim.close()
        self.groups.remove((claim, waiters))

    def running(self, task_class: str) -> int:
        return sum(one.granted and not one.left for claim, waiters in self.groups for one in waiters if claim.task_class == task_class)

    def check(self) -> None:
        held = self.queue.held
        assert {name: self.running(name) for name in (TRAIN, EVAL)} == held
        waiting = [one for claim, waiters in self.groups for one in waiters if not one.granted and claim.task_class == TRAIN]
        if self.queue.slots - sum(held.values()) >= max(1, self.queue.slots // LOTS):
            assert not waiting, "a lot of slots is free and a sample waits"
        begun = [claim.place for claim, waiters in self.groups for one in waiters if one.granted and claim.task_class == TRAIN]
        assert not waiting or not begun or max(begun) <= min(one.group.place for one in waiting), (
            "a later group began before an earlier one"
        )


steps = st.one_of(
    st.tuples(st.just("take"), st.sampled_from([TRAIN, EVAL]), st.integers(1, 5) | st.integers(LOTS // 2, LOTS)),
    st.tuples(st.just("end"), st.integers(0, 99)),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(st.just("resize"), st.integers(1, 12) | st.integers(2 * LOTS, 4 * LOTS)),
)


@given(limit=st.integers(1, 12) | st.integers(2 * LOTS, 4 * LOTS), trains=st.booleans(), done=st.lists(steps, max_size=60))
def test_slots_are_never_exceeded_nor_lost(limit: int, trains: bool, done: list[tuple[str, ...]]) -> None:
    model = Model(slots(limit, trains=trains))
    calls: dict[str, Callable[..., None]] = {
        "take": model.take,
        "end": model.end,
        "cancel": model.cancel,
        "resize": lambda limit: resize(model.queue, limit),
    }
    most = limit
    for name, *arguments in done:
        before = sum(model.queue.held.values())
        calls[name](*arguments)
        most = model.queue.slots
        assert sum(model.queue.held.values()) <= max(most, before), "more requests than slots"
        model.check()
    while model.groups:
        left = len(model.groups)
        model.end(0)
        model.check()
        assert len(model.groups) <= left
        assert model.queue.held[TRAIN] + model.queue.held[EVAL] > 0 or not model.groups, "a group waits for ever"
    assert model.queue.held == {TRAIN: 0, EVAL: 0}
    assert model.queue.claimed(TRAIN) == model.queue.claimed(EVAL) == 0


# --- slots by an engine's load: more while they make it faster, fewer once its memory is full


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
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="1"} 31.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 4.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="1"} 4.0
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
