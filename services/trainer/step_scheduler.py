"""Rank 0's decisions: what all ranks do next, and for whom they wait.

The actor pushes where replicas are behind, else trains the next batch; with a critic it waits for the values of the batch first. The critic
gives each batch its values, and trains it; where the reward is charged with a KL, it waits for the actor's first.
"""

from __future__ import annotations

import time
from typing import Any

import structlog

from services.trainer.actor_critic_exchange import ActorCriticExchange
from services.trainer.colocation import ColocationScheduler
from services.trainer.commands import Leave, Order, Push, Snapshot, Train, Value, Wait
from services.trainer.control_client import ControlClient, StopAsked
from services.trainer.weights.pusher import Pusher
from services.trainer.weights.snapshot_writer import SnapshotWriter
from shared.runtime.errors import DeadlineExceeded
from shared.schema.messages import Batch, BatchPending, RunDone
from shared.schema.versions import version_after

TOLD_SECONDS = 30.0
"""How often a long wait is logged with whom it waits for."""

POLL_INTERVAL_S = 0.02
HOLD_SECONDS = 2.0
"""How long a wait for the other role is held before the ranks are told to come back: they wait for each other's orders meanwhile."""


class Patience:
    """One wait at a time, from its first question to its deadline.

    Args:
        seconds: to wait for one batch, or for the other role, before giving up with an error that names whom it waited for.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._told = 0.0
        self._log: Any = structlog.get_logger()

    def end(self) -> None:
        """What was waited for is there."""
        self._since = None

    def keep(self, what: str, whom: str, **known: int) -> None:
        """Goes on waiting. Raises DeadlineExceeded."""
        now = time.monotonic()
        if self._since is None:
            self._since = self._told = now
        waited = now - self._since
        if waited > self._seconds:
            raise DeadlineExceeded(what, whom, waited, "the trainer stops")
        if now - self._told > TOLD_SECONDS:
            self._told = now
            self._log.info("waiting", what=what, whom=whom, seconds=round(waited), **known)


class Batches:
    """The next batch, asked of the buffer."""

    def __init__(self, link: ControlClient, patience: Patience) -> None:
        self._link, self._patience = link, patience
        self._log: Any = structlog.get_logger()

    def next(self, step: int, version: int) -> Batch | Order:
        """The batch of ``step``, or what to do without it."""
        try:
            answer = self._link.batch(step, version)
        except StopAsked:
            return Leave(done=False)
        if isinstance(answer, Batch):
            self._patience.end()
            return answer
        if isinstance(answer, RunDone):
            if answer.reason:
                self._log.warning("run_failed", reason=answer.reason)
            return Leave(done=not answer.reason)
        assert isinstance(answer, BatchPending)  # the third and last kind of answer
        self._patience.keep(f"the batch of step {answer.step}", answer.waiting_for, have=answer.have, need=answer.need)
        return Wait()


class StepScheduler:
    """Gives the actor's next order for the step that is due; a push that has begun goes on beside it.

    Args:
        batch_timeout: see `Patience`. steps: of the run. interval: steps between pushes. exchange: with a critic, None without one.
        turns: with engines on the trainer's GPUs.
    """

    def __init__(
        self,
        link: ControlClient,
        pusher: Pusher,
        snapshots: SnapshotWriter,
        batch_timeout: float,
        *,
        steps: int,
        interval: int,
        turns: ColocationScheduler,
        exchange: ActorCriticExchange | None = None,
    ) -> None:
        self._link, self._pusher, self._exchange, self._turns = link, pusher, exchange, turns
        self._snapshots = snapshots
        self._steps, self._interval = steps, interval
        self._batches, self._for_critic = Batches(link, Patience(batch_timeout)), Patience(batch_timeout)

    def next(self, step: int, version: int) -> Order:
        """Args: step: the next to train. version: the weights that the trainer holds. Raises DeadlineExceeded."""
        if self._link.stopping:
            return Leave(done=False)
        self._snapshots.tell_live()
        if (push := self._push(version)) is not None:
            return push
        if self._snapshots.due(version):
            return Snapshot(version)
        batch = self._batches.next(step, version)
        if not isinstance(batch, Batch):
            return batch
        if self._exchange is not None and not _held(self._link, self._exchange, "values", step):
            self._for_critic.keep(f"the values of step {step}", "the critic")
            return Wait()
        self._for_critic.end()
        return Train(batch, self._ahead(step + 1))

    def _push(self, version: int) -> Push | None:
        """The push to begin now. Engines on the trainer's GPUs are pushed to together, in its turn: sleep costs each its weights."""
        if self._snapshots.instead_of_pushes:
            return None
        if self._turns.colocated and self._pusher.lags(version):
            self._turns.prepare()
            self._pusher.forget(self._turns.lost())
        push = self._pusher.due(version)
        if push is None:
            self._turns.call_off()
        return push

    def _ahead(self, step: int) -> Batch | None:
        """The batch after this one, where it is there already, or can be formed at once."""
        if step >= self._steps:
            return None
        try:
            answer = self._link.batch(step, version_after(step, self._interval, self._steps), hold=False)
        except StopAsked:
            return None
        return answer if isinstance(answer, Batch) else None


class CriticStepScheduler:
    """Gives the critic's next order.

    Args:
        batch_timeout: see `Patience`. exchange: with the actor. charged: whether the actor's KL is needed to train a batch.
    """

    def __init__(self, link: ControlClient, batch_timeout: float, exchange: ActorCriticExchange, *, charged: bool) -> None:
        self._link, self._exchange, self._charged = link, exchange, charged
        self._batches, self._for_actor = Batches(link, Patience(batch_timeout)), Patience(batch_timeout)
        self._valued: Batch | None = None

    def next(self, step: int, version: int) -> Order:
        """Args: step: the next to train. version: of the actor's weights that it is trained on. Raises DeadlineExceeded."""
        if self._link.stopping:
            return Leave(done=False)
        if self._valued is None or self._valued.step != step:
            batch = self._batches.next(step, version)
            if not isinstance(batch, Batch):
                return batch
            self._valued = batch
            return Value(batch)
        if self._charged and not _held(self._link, self._exchange, "kl", step):
            self._for_actor.keep(f"the KL of step {step}", "the actor")
            return Wait()
        self._for_actor.end()
        return Train(self._valued)


def _held(link: ControlClient, exchange: ActorCriticExchange, kind: Any, step: int) -> bool:
    """Whether the other role's numbers of a step are there, or come soon."""
    end = time.monotonic() + HOLD_SECONDS
    while not exchange.complete(kind, step):
        if time.monotonic() > end or link.stopping:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True
