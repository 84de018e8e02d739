"""Takes groups from a queue, has them scored, and sends the outcome on."""

import asyncio
import contextlib
import time
import uuid
from typing import Any

from services.reward.group_filter import GroupFilter
from services.reward.payload_reader import PayloadReader
from services.reward.reward_router import RewardRouter
from services.reward.score_spans import score_span
from services.reward.scorer import Scorer
from shared.bus.streams import generated_consumer
from shared.bus.subjects import REWARD
from shared.bus.work_queue import FETCH_SECONDS, MessageLease, WorkQueue
from shared.environment.protocol import EnvironmentFailed
from shared.process.worker_pool import WorkerFailed
from shared.runtime.errors import (
    INFRASTRUCTURE,
    TASK,
    BadMessage,
    DeadlineExceeded,
    Fault,
    MessageTooLarge,
    MyxoError,
    PayloadMissing,
)
from shared.runtime.tasks import cancelled
from shared.runtime.telemetry import MetricSpec, declare_metrics
from shared.schema.messages import Failed, Generated, Outcome, Scored, failure_of
from shared.schema.sample import Sample, Score
from shared.schema.service_messages import Doing
from shared.service.activities import WORK
from shared.service.service_base import Service

declare_metrics(
    MetricSpec("samples_scored", "samples", "scored since the service started", counter=True),
    MetricSpec("groups_scored", "groups", "scored since the service started", labels=("environment",), counter=True),
    MetricSpec("groups_not_scored", "groups", "that could not be scored", labels=("environment",), counter=True),
    MetricSpec(
        "groups_tried_again",
        "groups",
        "handed to another service, or to the same once more, since processes or servers had failed",
        labels=("environment",),
        counter=True,
    ),
    MetricSpec("responses_unread", "samples", "that the verifier could not read", labels=("environment",), counter=True),
    MetricSpec("score_seconds", "s", "spent on scoring, summed over groups", labels=("environment",), counter=True),
)

_ON_INPUT = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What code raises that meets input nobody has thought of: it costs the group that brought it, not the service. Errors of servers are not
among them."""


SLOW_SECONDS = 30.0
"""Scoring that takes so long, and longer than its time limit, does not go on."""

HAND_BACK_SECONDS = 1.0
"""The time after which a group goes to another service, or to this one again, where no other is."""


class TryElsewhere(MyxoError):
    """A group was not scored for a fault that is not its own: it is tried once more before it dies of it."""


class GroupConsumer:
    """A queue and its groups in progress; a slow environment delays only the groups of its own queue.

    Args:
        scorer: says how many groups of the queue are in hand at once, and when it takes work. router: scores them.
    """

    def __init__(self, service: Service, reader: PayloadReader, scorer: Scorer, router: RewardRouter, group_filter: GroupFilter) -> None:
        self._service, self._reader, self._scorer, self._router, self._filter = service, reader, scorer, router, group_filter
        consumer = generated_consumer(service.run, service.config.bus, scorer.name)
        self._queue = WorkQueue(service.bus, consumer, Generated, self._on_unreadable)
        self.in_hand: set[asyncio.Task[None]] = set()
        self._scoring: dict[str, float] = {}  # group → when its scoring began, seconds since the epoch, the oldest first
        service.activities.watch(self.doing)

    async def run(self) -> None:
        """Scores until cancelled. Raises the error that keeps an outcome from being sent."""
        limit, running = self._scorer.limit, self.in_hand
        while True:
            if await self._may_fetch():
                for lease in await self._queue.fetch(limit - len(running)):
                    running.add(self._service.spawn(self._handle(lease)))
            if len(running) >= limit:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                running.discard(task)
                task.result()

    def doing(self) -> Doing | None:
        """Returns what the environment does with the groups in hand, since it began with the oldest one."""
        if not self._scoring:
            return None
        oldest, since = next(iter(self._scoring.items()))
        limit = self._service.config.reward.reward_timeout
        groups = f"{len(self._scoring)} {'group' if len(self._scoring) == 1 else 'groups'}"
        what = f"scores {groups} by {self._scorer.name}, the oldest is {oldest}"
        after = f"a verifier is given up after reward.reward_timeout = {limit:g} s, remote ones after their own timeouts"
        return Doing(part=WORK, what=what, since=since, next_action=after, stuck=time.time() - since > max(limit, SLOW_SECONDS))

    async def close(self) -> None:
        """Drops the groups in progress, which return to the queue by themselves."""
        await cancelled(self.in_hand)

    async def _may_fetch(self) -> bool:
        """Returns whether the environment takes work, and outcomes have room; waits a while where not."""
        if self._service.held_back:
            await asyncio.sleep(FETCH_SECONDS)
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._scorer.open.wait(), FETCH_SECONDS)
        return self._scorer.open.is_set()

    async def _handle(self, lease: MessageLease[Generated]) -> None:
        started = time.time()
        async with lease.held():
            try:
                outcome = await self._outcome(lease)
            except TryElsewhere as error:
                self._service.log.warning("group_handed_back", group=lease.message.group, error=str(error))
                self._service.metrics.add("groups_tried_again", environment=lease.message.environment)
                return await lease.hand_back(delay=HAND_BACK_SECONDS)
            try:
                await self._publish(outcome)
            except (MessageTooLarge, *_ON_INPUT) as error:  # the latter: what does not go into a message
                outcome = self._failed(lease.message, str(error), TASK)
                await self._publish(outcome)
        await lease.ack()
        if self._service.traces.on:
            self._service.traces.add(score_span(lease.message, outcome, started, time.time()))

    async def _on_unreadable(self, data: bytes, reason: str) -> None:
        if (failed := failure_of(data, reason, by=self._service.instance)) is not None:
            self._service.metrics.add("groups_not_scored", environment=self._scorer.name)
            await self._publish(failed)

    async def _publish(self, outcome: Outcome) -> None:
        await self._service.bus.publish(self._service.subjects.scored(REWARD), outcome, msg_id=uuid.uuid4().hex, deadline=600)

    async def _outcome(self, lease: MessageLease[Generated]) -> Scored | Failed:
        group = lease.message
        log = self._service.log.bind(group=group.group, environment=group.environment)
        if lease.exhausted:
            return self._failed(group, f"given up after {lease.deliveries - 1} deliveries", INFRASTRUCTURE)
        try:
            return await self._scored(group, log)
        except (PayloadMissing, BadMessage, WorkerFailed, EnvironmentFailed, DeadlineExceeded) as error:
            if error.fault == INFRASTRUCTURE and lease.deliveries == 1:
                raise TryElsewhere(str(error)) from error
            (log.error if error.fault == TASK else log.warning)("group_not_scored", error=str(error), fault=error.fault)
            return self._failed(group, str(error), error.fault)
        except _ON_INPUT as error:
            log.exception("group_not_scored")
            return self._failed(group, f"{type(error).__name__}: {error}", TASK)

    async def _scored(self, group: Generated, log: Any) -> Scored:
        samples = await self._reader.read(group)
        scores = await self._timed(group, samples)
        decided = await self._filter.decide(group.group, samples, scores)
        metrics, final = self._service.metrics, decided.scores
        metrics.add("samples_scored", len(scores))
        metrics.add("groups_scored", environment=group.environment)
        unread = tuple((index, score.unread) for index, score in enumerate(final) if score.unread)
        if unread:
            metrics.add("responses_unread", len(unread), environment=group.environment)
            log.warning("responses_unread", samples=dict(unread))
        return Scored(
            **dict(group) | {"samples": [item.meta(item.token_digest()) for item in samples]},
            rewards=[score.reward for score in final],
            parts=tuple(score.parts for score in final) if any(score.parts for score in final) else (),
            removed=tuple(index for index, score in enumerate(final) if score.removed),
            unread=unread,
            filtered=decided.filtered,
        )

    async def _timed(self, group: Generated, samples: list[Sample]) -> list[Score]:
        started = time.monotonic()
        self._scoring[group.group] = time.time()
        try:
            return await self._router.score(group, samples)
        finally:
            self._scoring.pop(group.group, None)
            self._service.metrics.add("score_seconds", time.monotonic() - started, environment=group.environment)

    def _failed(self, group: Generated, reason: str, fault: Fault) -> Failed:
        self._service.metrics.add("groups_not_scored", environment=group.environment)
        by = self._service.instance
        return Failed(group=group.group, attempt=group.attempt, reason=reason, by=by, fault=fault, payload=group.payload)
