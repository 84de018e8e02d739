"""Decides which sample goes to the engine next, and how many groups may be taken. Pure: no clock and no I/O.

A replica has slots, one for each request that may be in the engine at once. The samples of its groups take them in order, those of the
group that was taken first before all others. Slots that were left are filled a *lot* at a time: whatever begins has its prompt prefilled
first, and all that run wait for it, a small model for longer than two steps of decoding. One prefill of a lot instead of one of each costs
at most the lot's slots. A group in hand *claims* a slot for each of its samples that has not ended; groups are taken while there are more
slots than claims, so at most one group waits to be begun.

Evaluations have half of the slots at most, so that training never waits for them to end; where nothing is trained, they have all. Those
that wait come before training: a held-out prompt is taken for a version, and would fall behind it.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from shared.bus.subjects import EVAL, TRAIN

LOTS = 32
"""The share of the slots that a lot is: so much of the engine is idle at most for the sake of joint prefills."""


def lot(slots: int) -> int:
    """Returns how many of so many slots are filled together."""
    return max(1, slots // LOTS)


@dataclass(eq=False)
class GroupClaim:
    """The claim of a group in hand. ``place``: the how many-th it was taken; ``open``: its samples that have not ended."""

    task_class: str
    place: int
    open: int


@dataclass(eq=False)
class SlotWaiter:
    """A sample that waits for a slot. ``index``: in its group. ``wake``: called once it gets one. ``granted``: it has, or had, one."""

    claim: GroupClaim
    index: int
    wake: Callable[[], None]
    granted: bool = False
    left: bool = False

    def __lt__(self, other: "SlotWaiter") -> bool:
        return (self.claim.place, self.index) < (other.claim.place, other.index)


class SlotQueue:
    """The slots of one replica.

    Args:
        trains: whether groups are trained; else evaluations have all slots.

    Attributes:
        limit: slots; may be lowered below those that are held, and none is granted then until enough have been left.
        held: slots that are held now, by task class.
    """

    def __init__(self, limit: int, trains: bool = True) -> None:
        self.limit, self._trains = limit, trains
        self.held = {TRAIN: 0, EVAL: 0}
        self._claims: dict[str, set[GroupClaim]] = {TRAIN: set(), EVAL: set()}
        self._waiting: dict[str, list[SlotWaiter]] = {TRAIN: [], EVAL: []}
        self._places = itertools.count()
        self._filling = True  # slots are given as they are asked for, since not all have been held

    # --- groups

    def take(self, task_class: str, samples: int) -> GroupClaim:
        """Notes a group that was taken."""
        claim = GroupClaim(task_class, next(self._places), samples)
        self._claims[task_class].add(claim)
        return claim

    def drop(self, claim: GroupClaim) -> None:
        """Notes that a group is no longer in hand. Its samples have left their slots."""
        self._claims[claim.task_class].discard(claim)

    def claimed(self, task_class: str) -> int:
        """Returns how many samples of a class have not ended, those that nobody has begun included."""
        return sum(claim.open for claim in self._claims[task_class])

    def room(self, task_class: str, samples: int) -> int:
        """Returns how many groups of so many samples may be taken: as many as begin to use all slots."""
        evaluating = min(self.claimed(EVAL), self._most_evaluating)
        if task_class == EVAL:
            free = self._most_evaluating - self.claimed(EVAL)
        else:
            free = self.limit - self.claimed(TRAIN) - evaluating
        return max(0, -(-free // samples))

    # --- slots

    def ask(self, claim: GroupClaim, index: int, wake: Callable[[], None]) -> SlotWaiter:
        """Has a sample wait for a slot, which it may get at once. ``index``: of the sample in its group."""
        waiter = SlotWaiter(claim, index, wake)
        heapq.heappush(self._waiting[claim.task_class], waiter)
        self.grant()
        return waiter

    def leave(self, waiter: SlotWaiter) -> None:
        """Gives a sample's slot to the next one, or has it wait no longer. A repeat does nothing."""
        if waiter.left:
            return
        waiter.left = True
        if waiter.granted:
            self.held[waiter.claim.task_class] -= 1
        self.grant()

    def resize(self, limit: int) -> None:
        """Sets the number of slots."""
        self.limit = limit
        self.grant()

    def grant(self) -> None:
        """Gives free slots to those that wait: once all were held, not before a lot of them is free."""
        free = self.limit - sum(self.held.values())
        self._filling = free > 0 and (self._filling or free >= lot(self.limit))
        while self._filling and (waiter := self._next()) is not None:
            waiter.granted = True
            self.held[waiter.claim.task_class] += 1
            self._filling = sum(self.held.values()) < self.limit
            waiter.wake()

    def _next(self) -> SlotWaiter | None:
        evaluations = (EVAL,) if self.held[EVAL] < self._most_evaluating else ()
        for task_class in (*evaluations, TRAIN):
            queue = self._waiting[task_class]
            while queue:
                waiter = heapq.heappop(queue)
                if not waiter.left:
                    return waiter
        return None

    @property
    def _most_evaluating(self) -> int:
        return max(1, self.limit // 2) if self._trains else self.limit
