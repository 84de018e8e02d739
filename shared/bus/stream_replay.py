"""Reads a stream from its beginning to its present end, for the buffer's recovery, the audit, the summary and the console.

It uses JetStream's batched direct get (ADR-31, NATS 2.11) and no consumer: an account that may make a consumer may name the subject to
which the server delivers its messages, whatever the account's own rights. A direct get only answers. A server before 2.11 answers with
one message at a time, which works, too.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import TypeVar

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.bus.bus_errors import ATTEMPT_SECONDS, RETRY_PAUSE, TRANSIENT
from shared.bus.connection import Bus
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.schema.messages import Message

Entry = TypeVar("Entry", bound=Message)

FETCH = 256
"""Messages of one direct get."""

SEQUENCE, PENDING, STATUS = "Nats-Sequence", "Nats-Num-Pending", "Status"
NO_RESPONDERS = "503"


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
                    progress, seen = time.monotonic(), int((message.headers or {})[SEQUENCE])
                    if seen > newest:
                        return
                    if (entry := decoded(model, message.data, strict)) is not None:
                        yield seen, entry
                await asyncio.sleep(0)  # a long history leaves the loop to others
            return
        except (nats.errors.Error, *TRANSIENT) as error:
            bus.raise_if_refused(progress, f"$JS.API.DIRECT.GET.{stream}")
            if time.monotonic() - progress > deadline:
                raise DeadlineExceeded(f"messages of {stream} after {seen}", "the bus", deadline, "given up") from error
            await asyncio.sleep(RETRY_PAUSE)
        finally:
            if not bus.connection.is_closed:
                await answers.unsubscribe()


def decoded(model: type[Entry], data: bytes, strict: bool) -> Entry | None:
    """Returns a message; None for one that cannot be decoded, where that is not ``strict``. Raises BadMessage."""
    try:
        return model.decode(data)
    except BadMessage:
        if strict:
            raise
        return None


async def _batch(bus: Bus, answers: Subscription, stream: str, subject: str, first: int) -> tuple[list[Msg], int]:
    """Asks for the next messages from sequence ``first`` on; returns them, and how many there are behind them."""
    request = {"seq": first, "batch": FETCH, "next_by_subj": subject}
    await bus.connection.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=answers.subject)
    found: list[Msg] = []
    while True:
        message = await answers.next_msg(timeout=ATTEMPT_SECONDS)
        headers = message.headers or {}
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
