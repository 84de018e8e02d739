"""Slots for requests in the engine: groups in hand hold claims, and each of their samples waits here for its slot."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.rollout.slot_limit import MOST, EngineLoad, SlotLimit
from services.rollout.slot_queue import GroupClaim, SlotQueue
from shared.bus.subjects import EVAL, TRAIN
from shared.config.run_config import RunConfig
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task


class GroupSlots:
    """The slots of one group's samples."""

    def __init__(self, queue: SlotQueue, claim: GroupClaim) -> None:
        self._queue, self._claim = queue, claim

    @contextlib.asynccontextmanager
    async def slot(self, index: int) -> AsyncIterator[None]:
        """Holds a slot while the body runs; waits for it first. ``index``: of the sample in its group."""
        ready = asyncio.Event()
        waiter = self._queue.ask(self._claim, index, ready.set)
        try:
            await ready.wait()
            yield
        finally:
            self._queue.leave(waiter)

    def end(self) -> None:
        """Notes that a sample has ended: another group's may take its slot."""
        self._claim.open = max(0, self._claim.open - 1)

    def close(self) -> None:
        """Notes that the group is no longer in hand."""
        self._queue.drop(self._claim)


class RequestSlots:
    """The slots of one replica: as many as `rollout.rollout_concurrency` says, or as its engine's load allows.

    Args:
        captured: requests at once that the engine is made for, the bound of slots that the run does not name; None: there is none.
    """

    def __init__(self, config: RunConfig, captured: int | None = None) -> None:
        rollout = config.rollout
        self._group = rollout.n_samples_per_prompt + rollout.surplus_rollouts
        share = -(-rollout.rollout_batch_size // rollout.rollout_replicas) * self._group
        self._limit = SlotLimit(rollout.rollout_concurrency, self._group, share, captured or MOST)
        self._queue = SlotQueue(self._limit.slots, config.has_steps)
        self._surplus = rollout.surplus_rollouts

    @property
    def limit(self) -> int:
        return self._queue.limit

    @property
    def held(self) -> int:
        """Returns how many slots are held."""
        return sum(self._queue.held.values())

    def room(self, task_class: str) -> int:
        """Returns how many groups of a class may be taken."""
        return self._queue.room(task_class, self._group)

    def taken(self, task: Task) -> GroupSlots:
        """Returns the slots of a group that was taken; the caller closes them."""
        evaluation = is_evaluation(task.group)
        return GroupSlots(self._queue, self._queue.take(EVAL if evaluation else TRAIN, task.n + (0 if evaluation else self._surplus)))

    def note(self, load: EngineLoad | None, tokens: int, now: float) -> None:
        """Follows the engine's load; None: an engine that does not tell it, or a new one. Otherwise as `SlotLimit.note`."""
        if load is None:
            self._limit.renew()
        else:
            self._queue.resize(self._limit.note(load, self.held, tokens, now))
