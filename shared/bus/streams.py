"""A run's streams, consumers and buckets: makes them with every policy set explicitly, and reads a stream from its beginning to its present
end.

Every stream is bound by bytes. When full, work queues, the ledger and the buckets discard *new* messages (back-pressure: a publisher waits,
nothing is lost, `shared.runtime.back_pressure`). Only the events stream, on which no decision depends, discards its oldest.

Reading is for the buffer's recovery, the audit, the summary and the console. It uses JetStream's batched direct get (ADR-31, NATS 2.11) and
no consumer: an account that may make a consumer may name the subject to which the server delivers its messages, whatever the account's own
rights. A direct get only answers. A server before 2.11 answers with one message at a time, which works, too.
"""

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TypeVar

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import BadRequestError, NotFoundError

from shared.bus.bus_errors import ATTEMPT_SECONDS, RETRY_PAUSE, TRANSIENT, StreamFull
from shared.bus.connection import NO_RESPONDERS, Bus
from shared.bus.subjects import EVAL, TRAIN, Subjects
from shared.config.run_config import RunConfig
from shared.config.service_sections import BusSection
from shared.rewards.names import queue_of
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.schema.messages import Message

DUPLICATE_WINDOW = 600.0  # Seconds in which a repeated `Nats-Msg-Id` counts once; receivers are idempotent beyond it
MAX_EVENTS = 100_000
# The bytes of events that a run keeps, the latest ones. The server reserves the bytes of all streams when the run is created, a gigabyte
# with the defaults: much more, and a small disk would be full after a few runs.
EVENTS_BYTES = 1 << 26
BUCKET_BYTES = 16 << 20  # The bytes of a KV bucket, which keeps the last value of each key: the statuses of thousands of services
SPARE_DELIVERIES = 2  # Deliveries beyond `max_deliver`: one lets a worker declare the message dead, and the worker may die of that, too
MAX_WAITING = 1 << 16  # Pulls that wait on a consumer at once: each idle replica has one; the server ends others at once (default: 512)
CREATE_SECONDS = 30.0
_NAME_IN_USE = 10058


@dataclass(frozen=True)
class Consumer:
    """A durable consumer: its subject in a stream; the ``settings`` have its ack deadline and its limits."""

    stream: str
    name: str
    subject: str
    settings: BusSection


def task_consumer(run: str, bus: BusSection, task_class: str) -> Consumer:
    """Returns the consumer that all rollout replicas share: the groups of one task class."""
    names = Subjects(run)
    return Consumer(names.task_stream, task_class, names.task(task_class), bus)


def generated_consumer(run: str, bus: BusSection, environment: str) -> Consumer:
    """Returns the consumer of an environment's queue, which all reward services share."""
    names = Subjects(run)
    return Consumer(names.generated_stream, queue_of(environment), names.generated(environment), bus)


def scored_consumer(run: str, bus: BusSection) -> Consumer:
    """Returns the buffer's consumer."""
    names = Subjects(run)
    return Consumer(names.scored_stream, "buffer", names.scored("*"), bus)


async def create(bus: Bus, config: RunConfig) -> None:
    """Makes the run's streams, consumers and buckets; existing ones get their bounds in bytes, and stay unchanged else.

    Raises NotPermitted, DeadlineExceeded; StreamFull where the server cannot reserve the bytes of them.
    """
    try:
        await bus.retry(lambda: _create(bus, config), f"the streams of run {config.run.name}", "$JS.API.", deadline=CREATE_SECONDS)
    except StreamFull as error:
        remedy = "make room on its disk, raise its jetstream.max_file_store, or lower bus.max_queued_bytes and bus.max_ledger_bytes"
        raise StreamFull(f"the NATS server cannot reserve the run's streams; {remedy} ({error})") from error


async def _create(bus: Bus, config: RunConfig) -> None:
    run, names = config.run.name, Subjects(config.run.name)
    queues = {names.task_stream: names.task(">"), names.generated_stream: names.generated(">"), names.scored_stream: names.scored("*")}
    bounds = {"max_msgs": config.bus.max_queued, "max_bytes": config.bus.max_queued_bytes, "retention": RetentionPolicy.WORK_QUEUE}
    made = [_stream(name, [subject], config.bus).evolve(**bounds) for name, subject in queues.items()]
    made.append(_stream(names.ledger_stream, [names.ledger(">")], config.bus))
    events = _stream(names.events_stream, [names.event(plane, ">") for plane in ("weights", "trainer", "service")], config.bus)
    made.append(events.evolve(discard=DiscardPolicy.OLD, max_msgs=MAX_EVENTS, max_bytes=EVENTS_BYTES))
    if config.tinker.tinker_endpoint:
        made.append(_stream(names.commands_stream, [names.command(">")], config.bus))
    for stream in made:
        with _name_in_use_is_fine():
            await bus.js.add_stream(stream)
            continue
        await _limit(bus, stream)
    for consumer in (
        *(task_consumer(run, config.bus, task_class) for task_class in (TRAIN, EVAL)),
        *(generated_consumer(run, config.bus, queue) for queue in config.queues()),
        scored_consumer(run, config.bus),
    ):
        await _add_consumer(bus, consumer)
    for bucket in (names.config_bucket, names.weights_bucket, names.leases_bucket, names.secrets_bucket, names.services_bucket):
        ttl = config.bus.registry_ttl if bucket == names.services_bucket else None
        keys = KeyValueConfig(bucket=bucket, history=1, ttl=ttl, max_bytes=BUCKET_BYTES, replicas=config.bus.replicas)
        with _name_in_use_is_fine():
            await bus.js.create_key_value(keys)


@contextlib.contextmanager
def _name_in_use_is_fine() -> Iterator[None]:
    try:
        yield
    except BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise


async def _limit(bus: Bus, stream: StreamConfig) -> None:
    """Gives an existing stream the bytes of the config, which may have changed; a full one has room again then. Direct gets read it."""
    assert stream.name is not None
    there = (await bus.js.stream_info(stream.name)).config
    if there.max_bytes != stream.max_bytes or not there.allow_direct:
        await bus.js.update_stream(there.evolve(max_bytes=stream.max_bytes, allow_direct=True))


def _stream(name: str, subjects: list[str], bus: BusSection) -> StreamConfig:
    return StreamConfig(
        name=name,
        subjects=subjects,
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs=-1,
        max_bytes=bus.max_ledger_bytes,
        max_age=0,
        num_replicas=bus.replicas,
        duplicate_window=DUPLICATE_WINDOW,
        allow_direct=True,
    )


async def _add_consumer(bus: Bus, consumer: Consumer) -> None:
    settings = consumer.settings
    with contextlib.suppress(NotFoundError):
        await bus.js.consumer_info(consumer.stream, consumer.name)
        return  # the server would apply the new policy to an existing stream
    await bus.js.add_consumer(
        consumer.stream,
        ConsumerConfig(
            durable_name=consumer.name,
            filter_subject=consumer.subject,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=settings.ack_wait,
            max_deliver=settings.max_deliver + SPARE_DELIVERIES,
            max_ack_pending=settings.max_ack_pending,
            max_waiting=MAX_WAITING,
            num_replicas=settings.replicas,
        ),
    )


async def info(bus: Bus, stream: str, deadline: float) -> StreamInfo:
    attempt = functools.partial(bus.js.stream_info, stream)
    return await bus.retry(attempt, f"the state of stream {stream}", f"$JS.API.STREAM.INFO.{stream}", deadline=deadline)


async def created(bus: Bus, run: str, deadline: float = 15.0) -> str:
    """Returns when the run began, which no other run of its name has in common with it. Raises DeadlineExceeded."""
    return str((await info(bus, Subjects(run).ledger_stream, deadline)).created)


async def exists(bus: Bus, run: str, deadline: float = 15.0) -> bool:
    """Returns whether the bus holds a run of this name, and all that is needed to read its config: a run is made part by part.

    Raises DeadlineExceeded.
    """
    subjects = Subjects(run)
    with contextlib.suppress(NotFoundError):
        for stream in (subjects.ledger_stream, f"KV_{subjects.config_bucket}"):
            await info(bus, stream, deadline)
        return True
    return False


Entry = TypeVar("Entry", bound=Message)
FETCH = 256  # Messages of one direct get
SEQUENCE, BEFORE, PENDING, STATUS = "Nats-Sequence", "Nats-Last-Sequence", "Nats-Num-Pending", "Status"


async def last_sequence(bus: Bus, stream: str, deadline: float = 30.0) -> int:
    """Returns the sequence of the stream's newest message; 0 where it is empty."""
    return (await info(bus, stream, deadline)).state.last_seq


async def life(bus: Bus, stream: str, deadline: float) -> str:
    """Returns what changes where a stream is made anew, or a repair takes messages out of it."""
    found = await info(bus, stream, deadline)
    return f"{found.created} without {found.state.last_seq - found.state.messages} records"


async def read(
    bus: Bus, stream: str, model: type[Entry], subject: str = ">", deadline: float = 120.0, after: int = 0, strict: bool = True
) -> AsyncIterator[tuple[int, Entry]]:
    """Yields (sequence, message) for all messages that the stream holds now, oldest first.

    Args:
        model: the messages' (base) class. subject: a filter. deadline: seconds without progress.
        after: only messages with a higher sequence are read. strict: where it is not set, what cannot be decoded is left out: of a
            stream on which no decision depends, and into which every service may write.

    Raises BadMessage for what cannot be decoded, NotPermitted, DeadlineExceeded.
    """
    newest = await last_sequence(bus, stream, deadline)
    seen, progress = after, time.monotonic()
    while True:
        inbox = bus.connection.new_inbox()
        answers = await bus.connection.subscribe(inbox)
        try:
            pending = 1
            while pending and seen < newest:
                messages, pending = await _batch(bus, answers, stream, subject, seen + 1)
                for message in messages:
                    seen = int((message.headers or {})[SEQUENCE])
                    if seen > newest:
                        return
                    try:
                        yield seen, model.decode(message.data)
                    except BadMessage:
                        if strict:
                            raise
                    progress = time.monotonic()  # what the caller did meanwhile was no silence of the bus
                await asyncio.sleep(0)  # a long history leaves the loop to others
            with contextlib.suppress(NotFoundError):
                if subject == ">" and seen < newest:
                    await bus.js.get_msg(stream, newest)  # of the leader, as only it does not lag
                    raise nats.errors.Error(f"a server that lags has answered, up to {seen}")
            return
        except (nats.errors.Error, *TRANSIENT) as error:
            bus.raise_if_refused(progress, f"$JS.API.DIRECT.GET.{stream}", f"$JS.API.STREAM.MSG.GET.{stream}")
            if time.monotonic() - progress > deadline:
                raise DeadlineExceeded(f"messages of {stream} after {seen}", "the bus", deadline, "given up") from error
            await asyncio.sleep(RETRY_PAUSE)
        finally:
            if not bus.connection.is_closed:
                await answers.unsubscribe()


async def _batch(bus: Bus, answers: Subscription, stream: str, subject: str, first: int) -> tuple[list[Msg], int]:
    """Asks for the next messages from sequence ``first`` on; returns them, and how many there are behind them."""
    request = {"seq": first, "batch": FETCH, "next_by_subj": subject}
    await bus.connection.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=answers.subject)
    found, before = list[Msg](), "0"
    while True:
        message = await answers.next_msg(timeout=ATTEMPT_SECONDS)
        headers = message.headers or {}
        if headers.get(BEFORE, before) != before:
            raise nats.errors.Error(f"what stands behind {before} was lost on its way")
        before = headers.get(SEQUENCE, before)
        match headers.get(STATUS):
            case None:
                found.append(message)
                if PENDING not in headers:  # a server that knows no batches
                    return found, 1
            case "204":
                return found, int(headers.get(PENDING, 0))
            case "404":
                return found, 0
            case status:
                raise (
                    nats.errors.NoRespondersError
                    if status == NO_RESPONDERS
                    else nats.errors.Error(f"{status} {headers.get('Description', '')}")
                )
