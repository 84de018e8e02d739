"""Rank 0's decisions: push where replicas are behind, else train the next batch, else wait; leave when done or told to."""

from __future__ import annotations

import time
from typing import Any

import structlog

from services.trainer.link import Link
from services.trainer.orders import Leave, Order, Push, Train, Wait
from services.trainer.push import Pusher, Target
from shared.errors import DeadlineExceeded
from shared.messages import Batch, BatchPending, RunDone

TOLD_SECONDS = 30.0
"""How often a long wait is logged with whom it waits for."""


class Conductor:
    """Gives the next order for the step that is due.

    Args:
        batch_timeout: seconds to wait for one batch before giving up with an error that names whom it waited for.
    """

    def __init__(self, link: Link, pusher: Pusher, batch_timeout: float) -> None:
        self._link, self._pusher, self._batch_timeout = link, pusher, batch_timeout
        self._waiting_since: float | None = None
        self._told = 0.0
        self.targets: list[Target] = []
        self._log: Any = structlog.get_logger()

    def next(self, step: int, version: int) -> Order:
        """Args: step: the next to train. version: the weights that the trainer holds. Raises DeadlineExceeded."""
        if self._link.stopping:
            return Leave(done=False)
        self.targets = self._pusher.behind(version)
        if self.targets:
            return Push(version)
        answer = self._link.batch(step, version)
        if isinstance(answer, Batch):
            self._waiting_since = None
            return Train(answer)
        if isinstance(answer, RunDone):
            return Leave(done=True)
        assert isinstance(answer, BatchPending)  # the third and last kind of answer
        self._keep_waiting(answer)
        return Wait()

    def _keep_waiting(self, pending: BatchPending) -> None:
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = self._told = now
        waited = now - self._waiting_since
        if waited > self._batch_timeout:
            raise DeadlineExceeded(f"the batch of step {pending.step}", pending.waiting_for, waited, "the trainer stops")
        if now - self._told > TOLD_SECONDS:
            self._told = now
            self._log.info(
                "waiting_for_batch",
                step=pending.step,
                have=pending.have,
                need=pending.need,
                whom=pending.waiting_for,
                seconds=round(waited),
            )
