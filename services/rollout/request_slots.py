"""Slots for requests in the engine: decides how many a replica has, and gives them to the samples of groups in hand.

All is pure but `GroupSlots.slot`, in which a sample waits in asyncio.

More requests at once are more tokens a second, until the engine computes as fast as it can, or its memory is full: then it makes requests
wait, or takes running ones back and computes them anew. But each of them is slower, and its tokens are older when they are trained. So the
limit is raised, while all slots are used, as long as that makes the engine faster by a fair part of what it adds, and lowered where memory
lacks: hill climbing on the throughput, and the multiplicative decrease of congestion control (Chiu and Jain 1989).

A replica has slots, one for each request that may be in the engine at once. The samples of its groups take them in order, those of the
group that was taken first before all others. Slots that were left are filled a *lot* at a time: whatever begins has its prompt prefilled
first, and all that run wait for it, a small model for longer than two steps of decoding. One prefill of a lot instead of one of each costs
at most the lot's slots. A group in hand *claims* a slot for each of its samples that has not ended; groups are taken while there are more
slots than claims, so at most one group waits to be begun.

Evaluations have half of the slots at most, so that training never waits for them to end; where nothing is trained, they have all. Those
that wait come before training: a held-out prompt is taken for a version, and would fall behind it.
"""

import asyncio
import contextlib
import heapq
import itertools
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from shared.bus.subjects import EVAL, TRAIN
from shared.config.environment_variables import EVAL_VARIABLE
from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError
from shared.service.service_base import default_instance

LOTS = 32  # the share of the slots that a lot is: so much of the engine is idle at most for the sake of joint prefills


def lot(slots: int) -> int:
    """Returns how many of so many slots are filled together."""
    return max(1, slots // LOTS)


START = 256  # the slots that an engine begins with, at least
MOST = 4096  # the most slots: beyond them an engine gains nothing, and its answers take the service's time

# The share of the slots that is added at a time, and the share of it by which the engine has to be faster for them to stay.
GROWTH, WORTH = 0.25, 0.25

BACK_OFF = 0.9  # the share of the running requests that is kept after a retraction
FULL = 0.9  # the share of the engine's memory for keys and values from which on the limit does not grow: running requests need more
SPARE = 8  # one request waits in the engine for so many that run, so that it has the next one at hand when one ends
QUEUED_READINGS = 3  # readings in a row with requests that wait: a burst of new ones has been begun by then
SETTLING, MEASURED = 2, 4  # readings after a change that are passed over, and those after them over which the engine's speed is taken

# Readings after a retraction, and after slots that were not worth it, in which the limit does not grow.
CALM_READINGS, REST_READINGS = 10, 60


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load. ``running``, ``queued``: requests; ``kv_usage``: share of its memory for keys and values that is in use;
    ``retracted``: requests that it has taken back for want of memory since it started."""

    running: int
    queued: int
    kv_usage: float
    retracted: int = 0


class SlotLimit:
    """The slots of one replica, one reading of the engine's load after another.

    ``fixed``: slots that do not follow the load (`rollout.rollout_concurrency`); None: they do. ``least``: the fewest slots: a group's
    samples. ``batch``: its share of a batch's samples: with as many slots it begins, since a step may wait for all of them. ``most``:
    slots."""

    def __init__(self, fixed: int | None, least: int, batch: int = 0, most: int = MOST) -> None:
        self._fixed, self._least, self._most = fixed, least, min(MOST, most)
        self.slots = fixed or self._bounded(max(START, batch))
        self._queued = self._calm = self._readings = 0
        self._retracted: int | None = None
        self._from = (0, 0.0)  # tokens and time of the first reading that counts
        self._before: tuple[int, float] | None = None  # fewer slots, and the engine's speed with them

    def note(self, load: EngineLoad, held: int, tokens: int, now: float) -> int:
        """Returns the slots after a reading, about one a second. ``held``: slots that are held. ``tokens``: that the engine has generated
        by ``now``, monotonic seconds."""
        if self._fixed is not None:
            return self.slots
        retracted = max(0, load.retracted - (load.retracted if self._retracted is None else self._retracted))
        self._retracted = load.retracted
        self._queued = self._queued + 1 if load.queued * SPARE > load.running else 0
        self._calm = max(0, self._calm - 1)
        if retracted:
            self._lower(int(BACK_OFF * load.running), CALM_READINGS)
        elif self._queued >= QUEUED_READINGS and load.running:
            self._lower(load.running + load.running // SPARE + 1, 0)
        elif held > self.slots - lot(self.slots) and not load.queued and not self._calm and load.kv_usage < FULL:
            self._climb(tokens, now)
        else:
            self._readings = 0
        return self.slots

    def renew(self) -> None:
        """Forgets the readings of an earlier engine: a new one counts from zero."""
        self._retracted, self._queued, self._readings, self._before = None, 0, 0, None

    def _lower(self, slots: int, calm: int) -> None:
        self.slots, self._calm = self._bounded(min(self.slots, slots)), calm
        self._readings, self._before = 0, None

    def _climb(self, tokens: int, now: float) -> None:
        """Takes the engine's speed with the present slots; gives it more, or those back that were not worth it."""
        self._readings += 1
        if self._readings <= SETTLING:
            self._from = (tokens, now)
        if self._readings < SETTLING + MEASURED:
            return
        speed, self._readings = (tokens - self._from[0]) / max(now - self._from[1], 1e-9), 0
        if self._before is not None:
            fewer, slower = self._before
            if speed < slower * (1 + WORTH * (self.slots / fewer - 1)):
                self._lower(fewer, REST_READINGS)
                return
        self._before = (self.slots, speed)
        self.slots = self._bounded(int(self.slots * (1 + GROWTH)) + 1)

    def _bounded(self, slots: int) -> int:
        return max(self._least, min(self._most, slots))


@dataclass(eq=False)
class GroupSlots:
    """The slots of a group in hand. ``place``: its position in the order of arrival; ``open``: its samples that have not ended."""

    queue: "RequestSlots"
    task_class: str
    place: int
    open: int

    @contextlib.asynccontextmanager
    async def slot(self, index: int) -> AsyncIterator[None]:
        """Holds a slot while the body runs; waits for it first. ``index``: of the sample in its group."""
        ready = asyncio.Event()
        waiter = self.queue.ask(self, index, ready.set)
        try:
            await ready.wait()
            yield
        finally:
            self.queue.leave(waiter)

    def end(self) -> None:
        """Notes that a sample has ended: another group's may take its slot."""
        self.open = max(0, self.open - 1)

    def close(self) -> None:
        """Notes that the group is no longer in hand. Its samples have left their slots."""
        self.queue.groups.discard(self)


@dataclass(eq=False)
class SlotWaiter:
    """A sample that waits for a slot. ``index``: in its group. ``wake``: called once it gets one. ``granted``: it has, or had, one."""

    group: GroupSlots
    index: int
    wake: Callable[[], None]
    granted: bool = False
    left: bool = False

    def __lt__(self, other: "SlotWaiter") -> bool:
        return (self.group.place, self.index) < (other.group.place, other.index)


def evaluates(config: RunConfig) -> bool | None:
    """Returns whether this replica takes held-out prompts alone (true) or none (false); None where they take both: by the environment,
    else by its instance's name, as the last replicas evaluate. Raises ConfigError."""
    given = os.environ.get(EVAL_VARIABLE, "")
    if given not in ("", "0", "1") or (given == "1" and not config.rollout.eval_replicas):
        raise ConfigError(EVAL_VARIABLE, given, f"1 or 0, and 1 only where rollout.eval_replicas = {config.rollout.eval_replicas} is not 0")
    if config.trainer.lent:  # held-out groups do not move to another replica
        return False
    if not (apart := config.rollout.eval_replicas):
        return None
    replicas = sum(group.replicas for group in config.rollout.engines())  # `rollout_replicas` is this replica's group alone
    last = range(replicas - apart, replicas)
    return given == "1" if given else default_instance("rollout") in [f"rollout-{number}" for number in last]


@dataclass
class DeliveryPace:
    """Holds a replica back that is too slow, or too far away, for what it generates to be trained: by its measured speed.

    Of a group that is begun now, as many versions will have come when its samples are handed in as the replica serves behind the live one,
    and as come while a group takes, from its task to the store. Where that is over ``max_staleness``, one group at a time is taken, which
    measures on. Times are seconds, means over about eight values.
    """

    max_staleness: int
    group_s: float = 0.0
    version_s: float = 0.0
    _live: tuple[int, float] | None = None

    def note_live(self, version: int, now: float) -> None:
        """Notes the newest version that was announced."""
        if version > (-1 if self._live is None else self._live[0]):
            if self._live is not None:
                self.version_s = _mean(self.version_s, (now - self._live[1]) / (version - self._live[0]))
            self._live = version, now

    def note_group(self, seconds: float) -> None:
        """Notes how long a group took."""
        self.group_s = _mean(self.group_s, seconds)

    def staleness(self, served: int) -> int:
        """Returns the expected staleness, in versions, of a group that is begun with version ``served``."""
        behind = 0 if self._live is None else max(0, self._live[0] - served)
        return behind + (int(self.group_s / self.version_s) if self.version_s else 0)

    def room(self, room: int, served: int, held: int) -> int:
        """Returns how many groups a replica may take that has ``room`` for so many and holds ``held``."""
        return room if self.staleness(served) <= self.max_staleness else min(room, int(not held))


def _mean(mean: float, value: float) -> float:
    return value if not mean else mean + (value - mean) / 8


class RequestSlots:
    """The slots of one replica.

    ``limit``: says how many there are; they may become fewer than those that are held, and none is granted then until enough have been
    left. ``samples``: of a group. ``trains``: whether groups are trained; else evaluations have all slots. Attributes: ``groups``: in hand.
    ``held``: slots that are held now, by task class."""

    def __init__(self, limit: SlotLimit, samples: int, trains: bool = True) -> None:
        self._limit, self._samples, self._trains = limit, samples, trains
        self.groups: set[GroupSlots] = set()
        self.held = {TRAIN: 0, EVAL: 0}
        self._waiting: dict[str, list[SlotWaiter]] = {TRAIN: [], EVAL: []}
        self._places = itertools.count()
        self._filling = True  # slots are given as they are asked for, since not all have been held

    @classmethod
    def of(cls, config: RunConfig, captured: int | None = None) -> "RequestSlots":
        """Returns those of a run: as many as `rollout.rollout_concurrency` says, or as its engine's load allows. ``captured``: requests at
        once that the engine is made for, the bound of slots that the run does not name; None: there is none."""
        rollout = config.rollout
        samples = rollout.n_samples_per_prompt + rollout.surplus_rollouts
        replicas = sum(group.replicas for group in rollout.engines()) - rollout.eval_replicas
        share = -(-rollout.rollout_batch_size // replicas) * samples
        return cls(
            SlotLimit(rollout.rollout_concurrency, samples, share, captured or MOST), samples, config.has_steps and not evaluates(config)
        )

    @property
    def slots(self) -> int:
        return self._limit.slots

    def note(self, load: EngineLoad | None, tokens: int, now: float) -> None:
        """Follows the engine's load; None: an engine that does not report it, or a new one. Otherwise as `SlotLimit.note`."""
        if load is None:
            self._limit.renew()
        else:
            self._limit.note(load, sum(self.held.values()), tokens, now)
            self.grant()

    # --- groups

    def take(self, task_class: str, samples: int) -> GroupSlots:
        """Returns the slots of a group that was taken; the caller closes them."""
        group = GroupSlots(self, task_class, next(self._places), samples)
        self.groups.add(group)
        return group

    def claimed(self, task_class: str) -> int:
        """Returns how many samples of a class have not ended, those that no one has begun included."""
        return sum(group.open for group in self.groups if group.task_class == task_class)

    def room(self, task_class: str) -> int:
        """Returns how many groups of a class may be taken: as many as begin to use all slots."""
        evaluating = self.claimed(EVAL)
        if task_class == EVAL:
            free = self._most_evaluating - evaluating
        else:
            free = self.slots - self.claimed(TRAIN) - min(evaluating, self._most_evaluating)
        return max(0, -(-free // self._samples))

    # --- slots

    def ask(self, group: GroupSlots, index: int, wake: Callable[[], None]) -> SlotWaiter:
        """Has a sample wait for a slot, which it may get at once. ``index``: of the sample in its group."""
        waiter = SlotWaiter(group, index, wake)
        heapq.heappush(self._waiting[group.task_class], waiter)
        self.grant()
        return waiter

    def leave(self, waiter: SlotWaiter) -> None:
        """Gives a sample's slot to the next one, or has it wait no longer. A repeat does nothing."""
        if waiter.left:
            return
        waiter.left = True
        if waiter.granted:
            self.held[waiter.group.task_class] -= 1
        self.grant()

    def grant(self) -> None:
        """Gives free slots to those that wait: once all were held, not before a lot of them is free."""
        free = self.slots - sum(self.held.values())
        self._filling = free > 0 and (self._filling or free >= lot(self.slots))
        while self._filling and (waiter := self._next()) is not None:
            waiter.granted = True
            self.held[waiter.group.task_class] += 1
            self._filling = sum(self.held.values()) < self.slots
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
        return max(1, self.slots // 2) if self._trains else self.slots
