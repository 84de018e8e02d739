"""Slots: never more than there are, none lost, the order of groups kept, and room for groups by samples that have not ended."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.request_slots import LOTS, GroupSlots, RequestSlots, SlotLimit, SlotWaiter
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
