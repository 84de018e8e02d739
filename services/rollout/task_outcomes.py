"""What becomes of a task: its samples are stored, then reported by reference, with a span of the replica's work on it."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from services.rollout.sample_spool import SampleSpool, SpooledGroup, StoredMessage, last_version
from services.rollout.teachers import Teachers
from shared.bus.bus_errors import TRANSIENT
from shared.bus.subjects import ROLLOUT
from shared.bus.work_queue import MessageLease
from shared.runtime.errors import BadMessage, DeadlineExceeded, Fault, PayloadMissing
from shared.runtime.traces import Attributes, TraceSpan
from shared.schema import sample as sample_codec
from shared.schema.digests import reference
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Discarded, Failed, Generated, Interrupted, Outcome, Task
from shared.schema.sample import Sample, fitted
from shared.schema.weight_messages import WeightsLive
from shared.service.service_base import Service

GENERATE = "generate"


def generation_span(task: Task, message: Generated | Outcome, replica: str, started: float, ended: float) -> TraceSpan | None:
    """Returns the span of work on a task that ended with ``message``; None where it has not ended. Times are seconds since the epoch."""
    error = ""
    known: Attributes = {}
    match message:
        case Generated(samples=samples, aborted=aborted):
            versions = [version for sample in samples for version in (sample.oldest, sample.newest) if sample.trained]
            known = {"samples": len(samples), "tokens": sum(sample.tokens for sample in samples), "aborted_rollouts": aborted}
            known |= {"oldest_version": min(versions, default=None), "newest_version": max(versions, default=None)}
        case Interrupted(stale=stale):
            known = {"stale": stale}
        case Discarded(reason=reason):
            known = {"reason": reason}
        case Failed(reason=reason):
            error = reason
        case _:
            return None
    return _span(task, replica, started, ended, error, {"outcome": type(message).__name__.lower(), **known})


def handed_back(task: Task, error: Exception, replica: str, started: float, ended: float) -> TraceSpan:
    """Returns the span of work on a task that goes back to the queue."""
    return _span(task, replica, started, ended, str(error), {"outcome": "handed back"})


def _span(task: Task, replica: str, started: float, ended: float, error: str, known: Attributes) -> TraceSpan:
    attributes: Attributes = {
        "group": task.group,
        "attempt": task.attempt,
        "replica": replica,
        "continued": task.partial is not None,
        **known,
    }
    return TraceSpan(trace=task.group, name=GENERATE, started=started, ended=ended, error=error, attributes=attributes)


PUBLISH_SECONDS = 600.0
LINK_SECONDS = 10.0  # for an attempt to send what lies in the spool
LINK_PAUSE = 1.0


class TaskOutcomes:
    """Makes and publishes the messages about the tasks of a replica."""

    def __init__(self, service: Service) -> None:
        self._service, self._config = service, service.config
        objective, temperature = service.config.algorithm, service.config.rollout.rollout_temperature
        self._spool = SampleSpool.of(service.config)
        self._published: dict[tuple[str, int], int] = {}  # the tasks in hand → when the server took each
        self._teachers = Teachers(objective, temperature) if objective.opd_teachers else None

    async def close(self) -> None:
        """Closes the connections to teachers."""
        if self._teachers is not None:
            await self._teachers.close()

    async def spooled(self, lease: MessageLease[Task]) -> Generated | Interrupted | None:
        """Notes a task that was taken. Stores what an earlier delivery of it came to, where the link took nothing then, and returns its
        message; None where nothing of it lies in the spool."""
        task = lease.message
        self._published[task.group, task.attempt] = lease.published
        if self._spool is None or (found := await asyncio.to_thread(self._spool.find, task, lease.published)) is None:
            return None
        self._service.log.info("spooled_group_found", group=task.group, attempt=task.attempt)
        return await self._sent(task, found, check_age=True)

    def forget(self, task: Task) -> None:
        """Notes that a task is no longer in hand."""
        self._published.pop((task.group, task.attempt), None)

    async def generated(self, task: Task, samples: list[Sample], started: float, ended: float, aborted: int = 0) -> Generated | Interrupted:
        """Stores a finished group's samples, with their teachers' log-probs, and returns the reference to them; of one that became too old
        while the link was down, that it is stale. Times are seconds since the epoch. ``aborted``: surplus rollouts.

        Raises BadMessage for samples that are too large, or too long to be trained, and as `Teachers.taught` does."""
        if not is_evaluation(task.group):
            samples = fitted(samples, self._config.longest_sample, self._config.rollout.overlong_samples)
            if self._teachers is not None:
                samples = await self._teachers.taught(samples)

        make = partial(
            Generated,
            group=task.group,
            attempt=task.attempt,
            samples=[sample.meta() for sample in samples],
            rollouts=sample_codec.rollouts(samples),
            aborted=aborted,
            replica=self._service.instance,
            environment=task.environment,
            started=started,
            ended=ended,
        )
        return await self._stored(task, samples, make)

    async def interrupted(self, task: Task, samples: list[Sample], *, stale: bool) -> Generated | Interrupted:
        """Returns the message that hands a group on with what its samples have so far; without samples, with nothing."""
        self._service.log.info("group_interrupted", group=task.group, attempt=task.attempt, stale=stale, kept=bool(samples))
        make = partial(Interrupted, group=task.group, attempt=task.attempt, stale=stale, replica=self._service.instance)
        return await self._stored(task, samples, make) if samples else make()

    def failed(self, task: Task, reason: str, fault: Fault) -> Failed:
        return Failed(group=task.group, attempt=task.attempt, reason=reason, by=self._service.instance, fault=fault)

    async def earlier(self, task: Task) -> list[Sample]:
        """Returns the samples that the task continues; none where they are lost, so that the group begins anew."""
        if task.partial is None:
            return []
        try:
            return sample_codec.decode(await self._service.store.read(task.partial))
        except (PayloadMissing, BadMessage) as error:
            self._service.log.warning("partial_lost", group=task.group, attempt=task.attempt, error=str(error))
            return []

    async def publish(self, task: Task, message: Generated | Outcome, started: float) -> None:
        """Publishes a message about a task: to be scored, or to the buffer. ``started``: when work on it began, seconds since the epoch."""
        names = self._service.subjects
        subject = names.generated(task.environment) if isinstance(message, Generated) else names.scored(ROLLOUT)
        await self._service.bus.publish(subject, message, msg_id=uuid.uuid4().hex, deadline=PUBLISH_SECONDS)
        if (published := self._published.pop((task.group, task.attempt), None)) is not None and self._spool is not None:
            await asyncio.to_thread(self._spool.remove, task, published)
            self._measure()
        if self._service.traces.on and (span := generation_span(task, message, self._service.instance, started, time.time())) is not None:
            self._service.traces.add(span)

    async def _stored(self, task: Task, samples: Sequence[Sample], make: Callable[..., StoredMessage]) -> StoredMessage:
        """Stores samples before their reference is published, under keys that no one else writes: a referenced payload never changes.
        Returns the message with it. Raises BadMessage for samples that are too large."""
        encoded, generation = sample_codec.encode(samples, self._config.store.blob_bytes), uuid.uuid4().hex
        names = self._service.subjects
        blobs = {names.payload_key(task.group, task.attempt, part, generation): blob for part, blob in enumerate(encoded)}
        message = make(payload=reference(self._service.run, blobs, [sample.length for sample in samples]))
        group = SpooledGroup(message, blobs, last_version(message, samples, self._config))
        published = self._published.get((task.group, task.attempt))
        if self._spool is not None and published is not None:
            await asyncio.to_thread(self._spool.put, task, published, group)
            self._measure()
        return await self._sent(task, group)

    async def _sent(self, task: Task, group: SpooledGroup, *, check_age: bool = False) -> StoredMessage:
        """Writes a group's samples into the store and returns its message. With a spool it waits for the link, and returns that the group
        is stale once it is; else it raises as `Store.write` does. ``check_age``: before the first attempt, too."""
        trains = not is_evaluation(task.group)
        while True:
            try:
                if check_age and trains and self._spool is not None and (live := await self._live()) > group.last:
                    self._service.metrics.add("too_old_at_source")
                    self._service.log.warning("group_too_old_at_source", group=task.group, attempt=task.attempt, live=live, last=group.last)
                    return Interrupted(group=task.group, attempt=task.attempt, stale=True, replica=self._service.instance)
                await self._service.store.write(group.blobs, deadline=LINK_SECONDS if self._spool is not None else 60.0)
                return group.message
            except (DeadlineExceeded, *TRANSIENT) as error:
                if self._spool is None:
                    raise
                if not check_age:
                    self._service.log.warning("link_down", group=task.group, attempt=task.attempt, error=str(error))
                check_age = True
                await asyncio.sleep(LINK_PAUSE)

    async def _live(self) -> int:
        value = await self._service.bus.get(self._service.subjects.weights_bucket, "live", deadline=LINK_SECONDS)
        return -1 if value is None else WeightsLive.decode(value).version

    def _measure(self) -> None:
        assert self._spool is not None
        self._spool.remove_too_old(self._service.version)
        for name, value in zip(("spooled_groups", "spooled_bytes"), self._spool.held(), strict=True):
            self._service.metrics.set(name, value)
