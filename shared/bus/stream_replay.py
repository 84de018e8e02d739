"""Reads a stream from its beginning to its present end, for the buffer's recovery, the audit and the summary."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from typing import TypeVar

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from shared.bus.bus_errors import RETRY_PAUSE, TRANSIENT
from shared.bus.connection import Bus
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.schema.messages import Message

Entry = TypeVar("Entry", bound=Message)

FETCH = 256
FETCH_SECONDS = 5.0


async def last_sequence(bus: Bus, stream: str, deadline: float = 30.0) -> int:
    """Returns the sequence of the stream's newest message; 0 where it is empty."""
    info = await bus.retry(
        lambda: bus.js.stream_info(stream), f"the state of stream {stream}", f"$JS.API.STREAM.INFO.{stream}", deadline=deadline
    )
    return info.state.last_seq


async def read(
    bus: Bus, stream: str, model: type[Entry], subject: str = ">", deadline: float = 120.0, after: int = 0, strict: bool = True
) -> AsyncIterator[tuple[int, Entry]]:
    """Yields (sequence, message) for all messages that the stream holds now, oldest first.

    Args:
        model: the messages' (base) class. subject: a filter. deadline: seconds without progress.
        after: only messages with a higher sequence are read. strict: where it is not set, what cannot be decoded is left out: of a
            stream on which no decision depends, and into which every service may write.

    Raises BadMessage for what cannot be decoded, DeadlineExceeded.
    """
    seen, progress = after, time.monotonic()
    while True:
        attempt = functools.partial(_reader, bus, stream, subject, seen + 1)
        pull, pending = await bus.retry(attempt, f"a reader of {stream}", f"$JS.API.CONSUMER.CREATE.{stream}", deadline=deadline)
        try:
            while pending > 0:
                try:
                    messages = await pull.fetch(min(FETCH, pending), timeout=FETCH_SECONDS)
                except (nats.errors.Error, *TRANSIENT) as error:
                    bus.raise_if_refused(progress, f"$JS.API.CONSUMER.MSG.NEXT.{stream}")
                    if time.monotonic() - progress > deadline:
                        raise DeadlineExceeded(f"{pending} messages of {stream}", "the bus", deadline, "given up") from error
                    await asyncio.sleep(RETRY_PAUSE)
                    break  # a restarted server has lost this consumer: a new one continues after the last message
                progress = time.monotonic()
                for message in messages:
                    pending -= 1
                    seen = message.metadata.sequence.stream
                    if (entry := decoded(model, message.data, strict)) is not None:
                        yield seen, entry
            else:
                return
        finally:
            with contextlib.suppress(nats.errors.Error, *TRANSIENT):
                await pull.unsubscribe()


def decoded(model: type[Entry], data: bytes, strict: bool) -> Entry | None:
    """Returns a message; None for one that cannot be decoded, where that is not ``strict``. Raises BadMessage."""
    try:
        return model.decode(data)
    except BadMessage:
        if strict:
            raise
        return None


async def _reader(bus: Bus, stream: str, subject: str, first: int) -> tuple[JetStreamContext.PullSubscription, int]:
    """Returns a consumer of the stream's messages from sequence ``first`` on, and how many there are.

    Each reader has its own, which the server removes after a minute unused. Nothing is acked, and reading changes nothing.
    """
    name = f"reader-{time.time_ns()}"
    config = ConsumerConfig(
        name=name,
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=first,
        inactive_threshold=60,
        max_deliver=1,
        filter_subject=None if subject == ">" else subject,
        mem_storage=True,
        num_replicas=1,
    )
    info = await bus.js.add_consumer(stream, config)
    return await bus.js.pull_subscribe_bind(name, stream), info.num_pending or 0
