"""What the run's streams, consumers and buckets look like: every policy set on purpose, none left at a default.

Work queues and the ledger discard *new* on full (back-pressure: a publisher waits, nothing is lost). Only the events stream, which
nothing decides by, lets its oldest go.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import BadRequestError, NotFoundError

from shared.bus.connection import RETRY_PAUSE, TRANSIENT, Bus
from shared.bus.subjects import EVAL, TRAIN, Subjects
from shared.config.run_config import RunConfig
from shared.config.sections import BusSection
from shared.runtime.errors import DeadlineExceeded

SERVICES_TTL = 10.0
"""Seconds after which a service that stopped its heartbeat is gone from the registry."""

DUPLICATE_WINDOW = 600.0
"""Seconds in which a repeated `Nats-Msg-Id` counts once; receivers are idempotent beyond it."""

EVENTS_KEPT = 100_000
EVENTS_BYTES = 1 << 26
"""What a run keeps of its events, the latest. The server sets the bytes aside when the run is made: a gigabyte each, and a server on a
small disk is full after a few runs."""


@dataclass(frozen=True)
class Consumer:
    """A durable consumer: who may take which subject of a stream, for how long, how often."""

    stream: str
    name: str
    subject: str
    ack_wait: float
    max_deliver: int
    max_ack_pending: int


def task_consumer(run: str, bus: BusSection, task_class: str) -> Consumer:
    """Shared by all rollout replicas: the groups of one task class."""
    names = Subjects(run)
    return _consumer(names.task_stream, task_class, names.task(task_class), bus)


def generated_consumer(run: str, bus: BusSection, environment: str) -> Consumer:
    """Shared by all replicas of one environment."""
    names = Subjects(run)
    return _consumer(names.generated_stream, environment, names.generated(environment), bus)


def scored_consumer(run: str, bus: BusSection) -> Consumer:
    """The buffer's."""
    names = Subjects(run)
    return _consumer(names.scored_stream, "buffer", names.scored, bus)


def _consumer(stream: str, name: str, subject: str, bus: BusSection) -> Consumer:
    return Consumer(stream, name, subject, bus.ack_wait, bus.max_deliver, bus.max_ack_pending)


async def create(bus: Bus, config: RunConfig) -> None:
    """Makes the run's streams, consumers and buckets; what is there already stays as it is. Raises NotPermitted."""
    start = time.monotonic()
    try:
        await _create(bus, config)
    except TRANSIENT:
        bus.raise_if_refused(start, "$JS.API.")
        raise


async def _create(bus: Bus, config: RunConfig) -> None:
    run, names = config.run.name, Subjects(config.run.name)
    for stream, subjects in (
        (names.task_stream, f"{run}.task.>"),
        (names.generated_stream, f"{run}.generated.>"),
        (names.scored_stream, names.scored),
    ):
        await _add_stream(bus, _stream(stream, [subjects], RetentionPolicy.WORK_QUEUE, config.bus, max_msgs=config.bus.max_queued))
    await _add_stream(bus, _stream(names.ledger_stream, [f"{run}.ledger.>"], RetentionPolicy.LIMITS, config.bus))
    planes = [f"{run}.{plane}.>" for plane in ("weights", "trainer", "service")]
    events = _stream(names.events_stream, planes, RetentionPolicy.LIMITS, config.bus)
    await _add_stream(bus, events.evolve(discard=DiscardPolicy.OLD, max_msgs=EVENTS_KEPT, max_bytes=EVENTS_BYTES))

    consumers = [task_consumer(run, config.bus, c) for c in (TRAIN, EVAL)]
    consumers += [generated_consumer(run, config.bus, environment) for environment in config.reward.environment_names()]
    consumers.append(scored_consumer(run, config.bus))
    for consumer in consumers:
        await _add_consumer(bus, consumer, config.bus.replicas)
    lasting = (names.config_bucket, names.weights_bucket, names.leases_bucket)
    for bucket, ttl in (*((bucket, None) for bucket in lasting), (names.services_bucket, SERVICES_TTL)):
        try:
            await bus.js.create_key_value(
                KeyValueConfig(bucket=bucket, history=1, ttl=ttl, storage=StorageType.FILE, replicas=config.bus.replicas)
            )
        except BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise


_NAME_IN_USE = 10058


def _stream(name: str, subjects: list[str], retention: RetentionPolicy, bus: BusSection, max_msgs: int = -1) -> StreamConfig:
    return StreamConfig(
        name=name,
        subjects=subjects,
        retention=retention,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs=max_msgs,
        max_bytes=-1,
        max_age=0,
        num_replicas=bus.replicas,
        duplicate_window=DUPLICATE_WINDOW,
        allow_direct=True,
    )


async def _add_stream(bus: Bus, config: StreamConfig) -> None:
    try:
        await bus.js.add_stream(config)
    except BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise


async def _add_consumer(bus: Bus, consumer: Consumer, replicas: int) -> None:
    try:
        await bus.js.consumer_info(consumer.stream, consumer.name)
        return  # the server would change it to the new policy
    except NotFoundError:
        pass
    await bus.js.add_consumer(
        consumer.stream,
        ConsumerConfig(
            durable_name=consumer.name,
            filter_subject=consumer.subject,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=consumer.ack_wait,
            max_deliver=consumer.max_deliver + 2,  # one more delivery lets a worker declare it dead, one is spare
            max_ack_pending=consumer.max_ack_pending,
            num_replicas=replicas,
        ),
    )


async def exists(bus: Bus, run: str, deadline: float = 15.0) -> bool:
    """Whether the bus holds a run of this name. Raises DeadlineExceeded."""
    stream, start = Subjects(run).ledger_stream, time.monotonic()
    end = start + deadline
    while True:
        try:
            await bus.js.stream_info(stream)
        except NotFoundError:
            return False
        except TRANSIENT as error:
            bus.raise_if_refused(start, f"$JS.API.STREAM.INFO.{stream}")
            if time.monotonic() > end:
                raise DeadlineExceeded(f"the state of stream {stream}", "the bus", deadline, "given up") from error
            await asyncio.sleep(RETRY_PAUSE)
        else:
            return True
