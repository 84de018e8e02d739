"""Rank 0's decisions: the next command for all ranks, and the waits for a batch or the other role.

The actor pushes where replicas are behind, else trains the next batch; with a critic it waits for the values of the batch first. The critic
gives each batch its values, and trains it; where the reward has a KL penalty, it waits for the actor's KL first.
"""

import time
from collections.abc import Callable
from typing import Any

import structlog

from services.trainer.actor_critic_exchange import ActorCriticExchange, Kind
from services.trainer.colocation import ColocationScheduler
from services.trainer.commands import Command, Leave, Lend, Push, Snapshot, Train, Value, Wait
from services.trainer.control_client import ControlClient, StopAsked
from services.trainer.weights.push_schedule import PushWait
from services.trainer.weights.pusher import Pusher
from services.trainer.weights.snapshot_writer import SnapshotWriter
from shared.config.run_config import RunConfig
from shared.runtime.errors import DeadlineExceeded
from shared.schema.messages import Batch, BatchPending, RunDone
from shared.schema.versions import version_after

LOG_INTERVAL_S = 30.0  # the interval at which a long wait is logged, with the name of the awaited thing
# The time after which a push beside a wait is named as what is awaited: no groups come while replicas are paused for it
PUSH_SECONDS = 5.0
POLL_INTERVAL_S = 0.02
HOLD_SECONDS = 2.0  # the time that one command waits for the other role before the ranks get `Wait`: they have to hear from rank 0 in time


class BatchRequester:
    """Asks the buffer for the next batch, and waits for the other role's tensors of it.

    Args:
        timeout: seconds of the longest wait for one batch, or for the other role, before the error that names the awaited service.
        evaluation: seconds that an evaluation may last besides, where nothing is left to train. push: what a push waits for now, if one
            is under way.
    """

    def __init__(
        self,
        control: ControlClient,
        exchange: ActorCriticExchange | None,
        timeout: float,
        evaluation: float = 0.0,
        push: Callable[[], PushWait | None] = lambda: None,
    ) -> None:
        self._push = push
        self._control, self._exchange, self._timeout, self._evaluation = control, exchange, timeout, evaluation
        self._awaited, self._since, self._logged = "", 0.0, 0.0  # the newest wait: for what, and when it began and was logged
        self._log: Any = structlog.get_logger()

    def next(self, step: int, version: int, hold: bool = True) -> Batch | Command:
        """Returns the batch of ``step``, or the command to give without it, at once without ``hold``. Raises DeadlineExceeded."""
        try:
            answer = self._control.batch(step, version, hold)
        except StopAsked:
            return Leave(done=False)
        if isinstance(answer, Batch):
            if self._awaited == f"the batch of step {step}":
                self._awaited = ""  # what is refused of it is another wait
            return answer
        if isinstance(answer, RunDone):
            if answer.reason:
                self._log.warning("run_failed", reason=answer.reason)
            return Leave(done=not answer.reason)
        assert isinstance(answer, BatchPending)  # the third and last kind of answer
        if answer.need:
            self._go_on_waiting(f"the batch of step {answer.step}", answer.waiting_for, have=answer.have, need=answer.need)
        else:
            self._go_on_waiting("the run's end", answer.waiting_for, self._evaluation)
        return Wait(save=answer.store_full)

    def has(self, kind: Kind, step: int, awaited_from: str) -> bool:
        """Returns whether the other role's tensors of a step are there, or come within `HOLD_SECONDS`. Raises DeadlineExceeded."""
        assert self._exchange is not None  # always there for an objective with a critic
        end = time.monotonic() + HOLD_SECONDS
        while not self._exchange.complete(kind, step):
            if time.monotonic() > end or self._control.stopping:
                self._go_on_waiting(f"the {'KL' if kind == 'kl' else kind} of step {step}", awaited_from)
                return False
            time.sleep(POLL_INTERVAL_S)
        return True

    def _go_on_waiting(self, what: str, awaited_from: str, longer: float = 0.0, **known: int) -> None:
        """Logs a long wait, which began when this was first called for ``what``. Raises DeadlineExceeded."""
        now = time.monotonic()
        if what != self._awaited:
            self._awaited, self._since, self._logged = what, now, now
        waited = now - self._since
        role = "critic" if "critic" in awaited_from else "trainer" if "actor" in awaited_from else "buffer"
        self._control.report_activity(what, [role], f"the trainer stops after {self._timeout + longer:g} s, and starts again")
        if (push := self._push()) is not None and push.seconds > PUSH_SECONDS:
            what, awaited_from = f"{push.what}, which {what} waits for", push.source
        if waited > self._timeout + longer:
            raise DeadlineExceeded(what, awaited_from, waited, "the trainer stops")
        if now - self._logged > LOG_INTERVAL_S:
            self._logged = now
            self._log.info("waiting", what=what, awaited_from=awaited_from, seconds=round(waited), **known)


class StepScheduler:
    """Gives the actor's next command for the step that is due, beside a push that has begun. ``exchange``: that with a critic, or None.
    ``lent``: pushes to engines on GPUs that the trainer lends while it waits, where there are any."""

    def __init__(
        self,
        control: ControlClient,
        config: RunConfig,
        pusher: Pusher,
        snapshots: SnapshotWriter,
        colocation: ColocationScheduler,
        exchange: ActorCriticExchange | None,
        lent: Pusher | None = None,
    ) -> None:
        self._control, self._pusher, self._snapshots, self._colocation, self._lent = control, pusher, snapshots, colocation, lent
        self._steps, self._interval = config.rollout.num_rollout, config.weights.update_weights_interval
        self._has_critic = exchange is not None
        self._batches = BatchRequester(control, exchange, config.trainer.batch_timeout, config.eval.eval_timeout, lambda: pusher.awaited)

    def next(self, step: int, version: int) -> Command:
        """Returns the next command. ``step``: the next to train. ``version``: that of the trainer's weights. Raises DeadlineExceeded."""
        if self._control.stopping:
            return Leave(done=False)
        self._snapshots.tell_live()
        if (push := self._push(version)) is not None:
            return push
        if self._snapshots.due(version):
            return Snapshot(version)
        lends = self._lent is not None and step < self._steps
        batch = self._batches.next(step, version, hold=not (lends and self._colocation.engines_offloaded))
        if not isinstance(batch, Batch):
            return (self._lend(version) if lends and batch == Wait() else None) or batch
        if self._has_critic:
            if not self._batches.has("values", step, "the critic"):
                return Wait()
            batch = self._batches.next(step, version)  # the critic may have refused groups of it, which have no values
        return Train(batch, self._ahead(step + 1)) if isinstance(batch, Batch) else batch

    def _push(self, version: int) -> Push | None:
        """Returns the push to begin now. Colocated engines get it together, while they are offloaded, since each loses its weights then."""
        if self._snapshots.instead_of_pushes:
            return None
        if self._lent is not None or not self._colocation.colocated:
            return self._pusher.due(version)
        self._pusher.forget(self._colocation.lost())  # a turn without a push, as after a refused batch, loses them too
        if self._pusher.lags(version):
            self._colocation.offload_engines()
            self._pusher.forget(self._colocation.lost())
        push = self._pusher.due(version)
        if push is None:
            self._colocation.call_off()
        return push

    def _lend(self, version: int) -> Lend | None:
        """Returns the lending to begin now; None while the GPUs are lent already, and while another push is under way: two would mix."""
        lent, colocation = self._lent, self._colocation
        assert lent is not None  # nothing else is lent
        if self._pusher.busy:
            time.sleep(POLL_INTERVAL_S)
            return None
        lent.forget(colocation.lost())
        if behind := lent.lags(version):  # one that has just come: all get the version together
            colocation.offload_engines()
            lent.forget(colocation.lost())
        push = lent.due(version) if behind else None
        return Lend(push) if push is not None or colocation.engines_offloaded else None

    def _ahead(self, step: int) -> Batch | None:
        if step >= self._steps:
            return None
        try:
            answer = self._control.batch(step, version_after(step, self._interval, self._steps), hold=False)
        except StopAsked:
            return None
        return answer if isinstance(answer, Batch) else None


class CriticStepScheduler:
    """Gives the critic's next command.

    Args:
        batch_timeout, evaluation: see `BatchRequester`. exchange: that with the actor. with_kl: whether the actor's KL is needed to train
            a batch.
    """

    def __init__(
        self, control: ControlClient, batch_timeout: float, exchange: ActorCriticExchange, *, with_kl: bool, evaluation: float
    ) -> None:
        self._control, self._with_kl = control, with_kl
        self._batches = BatchRequester(control, exchange, batch_timeout, evaluation)
        self._valued: Batch | None = None

    def next(self, step: int, version: int) -> Command:
        """Returns the next command. ``step``: the next to train. ``version``: that of the actor's weights. Raises DeadlineExceeded."""
        if self._control.stopping:
            return Leave(done=False)
        valued = self._valued
        lacks_kl = self._with_kl and valued is not None and valued.step == step and valued.groups
        if lacks_kl and not self._batches.has("kl", step, "the actor"):
            return Wait()
        batch = self._batches.next(step, version)
        if not isinstance(batch, Batch):
            return batch
        if batch == valued:
            return Train(batch)
        self._valued = batch  # the next one; or the actor has refused groups of it, which have no KL
        return Value(batch)

    def forget(self) -> None:
        """Has the next command ask for the batch again: this one was refused."""
        self._valued = None
