"""Reading a stream from its beginning to its present end: the buffer's recovery, the audit, the summary."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TypeVar

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from shared.bus.connection import RETRY_PAUSE, TRANSIENT, Bus
from shared.runtime.errors import DeadlineExceeded
from shared.schema.messages import Message

M = TypeVar("M", bound=Message)

FETCH = 256
FETCH_SECONDS = 5.0


async def last_sequence(bus: Bus, stream: str, deadline: float = 30.0) -> int:
    """The sequence of the stream's newest message; 0 where it is empty."""
    start = time.monotonic()
    end = start + deadline
    while True:
        try:
            return (await bus.js.stream_info(stream)).state.last_seq
        except TRANSIENT as error:
            bus.raise_if_refused(start, f"$JS.API.STREAM.INFO.{stream}")
            if time.monotonic() > end:
                raise DeadlineExceeded(f"the state of stream {stream}", "the bus", deadline, "given up") from error
            await asyncio.sleep(RETRY_PAUSE)


async def read(
    bus: Bus, stream: str, model: type[M], subject: str = ">", deadline: float = 120.0, after: int = 0
) -> AsyncIterator[tuple[int, M]]:
    """Yields (sequence, message) for all that the stream holds now, oldest first.

    Args:
        model: the messages' (base) class. subject: only messages on it. deadline: seconds without progress.
        after: only messages behind this sequence.
    """
    seen, progress = after, time.monotonic()
    while True:
        try:
            pull, pending = await _reader(bus, stream, subject, seen + 1)
        except TRANSIENT as error:
            bus.raise_if_refused(progress, f"$JS.API.CONSUMER.CREATE.{stream}")
            if time.monotonic() - progress > deadline:
                raise DeadlineExceeded(f"a reader of {stream}", "the bus", deadline, "given up") from error
            await asyncio.sleep(RETRY_PAUSE)
            continue
        try:
            while pending > 0:
                try:
                    messages = await pull.fetch(min(FETCH, pending), timeout=FETCH_SECONDS)
                except (nats.errors.Error, *TRANSIENT) as error:
                    bus.raise_if_refused(progress, f"$JS.API.CONSUMER.MSG.NEXT.{stream}")
                    if time.monotonic() - progress > deadline:
                        raise DeadlineExceeded(f"{pending} messages of {stream}", "the bus", deadline, "given up") from error
                    await asyncio.sleep(RETRY_PAUSE)
                    break  # a server that restarts forgets its readers: a new one goes on behind the last message
                progress = time.monotonic()
                for message in messages:
                    pending -= 1
                    seen = message.metadata.sequence.stream
                    yield seen, model.decode(message.data)
            else:
                return
        finally:
            with contextlib.suppress(nats.errors.Error, *TRANSIENT):
                await pull.unsubscribe()


async def _reader(bus: Bus, stream: str, subject: str, first: int) -> tuple[JetStreamContext.PullSubscription, int]:
    """A consumer of what the stream holds from sequence ``first`` on, and how many messages that is.

    One a reader: gone by itself after a minute unused; nothing is acked, reading changes nothing.
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
