"""What becomes of a task: its samples are stored, and then reported by reference."""

import time
import uuid
from collections.abc import Sequence

from services.rollout.generation_spans import generation_span
from services.rollout.teachers import Teachers
from shared.bus.subjects import ROLLOUT
from shared.runtime.errors import BadMessage, Fault, PayloadMissing
from shared.runtime.service_base import Service
from shared.schema import sample as sample_codec
from shared.schema.digests import reference
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Failed, Generated, Interrupted, Outcome, Payload, Task
from shared.schema.sample import Sample, fitted

PUBLISH_SECONDS = 600.0


class TaskOutcomes:
    """Makes and publishes the messages about the tasks of a replica."""

    def __init__(self, service: Service) -> None:
        self._service, self._config = service, service.config
        objective, temperature = service.config.algorithm, service.config.rollout.rollout_temperature
        self._teachers = Teachers(objective, temperature) if objective.opd_teachers else None

    async def close(self) -> None:
        """Closes the connections to teachers."""
        if self._teachers is not None:
            await self._teachers.close()

    async def generated(self, task: Task, samples: list[Sample], started: float, ended: float, aborted: int = 0) -> Generated:
        """Stores a finished group's samples, with their teachers' log-probs, and returns the reference to them. Times are seconds since the
        epoch. ``aborted``: surplus rollouts.

        Raises BadMessage for samples that are too large, or too long to be trained, and as `Teachers.taught` does.
        """
        if not is_evaluation(task.group):
            samples = fitted(samples, self._config.longest_sample, self._config.rollout.overlong_samples)
            if self._teachers is not None:
                samples = await self._teachers.taught(samples)
        return Generated(
            group=task.group,
            attempt=task.attempt,
            payload=await self._stored(task, samples),
            samples=[sample.meta() for sample in samples],
            rollouts=sample_codec.rollouts(samples),
            aborted=aborted,
            replica=self._service.instance,
            environment=task.environment,
            started=started,
            ended=ended,
        )

    async def interrupted(self, task: Task, samples: list[Sample], *, stale: bool) -> Interrupted:
        """Returns the message that hands a group on with what its samples have so far; without samples, with nothing."""
        payload = await self._stored(task, samples) if samples else None
        self._service.log.info("group_interrupted", group=task.group, attempt=task.attempt, stale=stale, kept=bool(samples))
        return Interrupted(group=task.group, attempt=task.attempt, stale=stale, replica=self._service.instance, payload=payload)

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
        if self._service.traces.on and (span := generation_span(task, message, self._service.instance, started, time.time())) is not None:
            self._service.traces.add(span)

    async def _stored(self, task: Task, samples: Sequence[Sample]) -> Payload:
        """Stores samples before their reference is published, under keys that nobody else writes: a referenced payload never changes.

        Raises BadMessage for samples that are too large.
        """
        encoded, generation = sample_codec.encode(samples, self._config.store.blob_bytes), uuid.uuid4().hex
        names = self._service.subjects
        blobs = {names.payload_key(task.group, task.attempt, part, generation): blob for part, blob in enumerate(encoded)}
        payload = reference(self._service.run, blobs, [sample.length for sample in samples])
        await self._service.store.write(blobs)
        return payload
