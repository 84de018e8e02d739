"""Reads a stream without a consumer, by JetStream's batched direct get (ADR-31, NATS 2.11): for accounts that may change nothing at all.

Whoever may make a consumer may name the subject that it delivers to, and the server publishes there whatever the account's own rights. A
direct get only answers. A server before 2.11 answers with one message at a time, which works, too.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.bus.bus_errors import ATTEMPT_SECONDS, RETRY_PAUSE, TRANSIENT
from shared.bus.connection import Bus
from shared.bus.stream_replay import FETCH, Entry, decoded
from shared.runtime.errors import DeadlineExceeded

SEQUENCE, PENDING, STATUS = "Nats-Sequence", "Nats-Num-Pending", "Status"
NOBODY = "503"


async def read(
    bus: Bus, stream: str, model: type[Entry], subject: str = ">", deadline: float = 10.0, after: int = 0, strict: bool = True
) -> AsyncIterator[tuple[int, Entry]]:
    """Yields (sequence, message) for all messages, oldest first, until there is none behind the last one.

    The arguments are those of `stream_replay.read`.

    Raises BadMessage for what cannot be decoded, NotPermitted, DeadlineExceeded after ``deadline`` seconds without progress.
    """
    seen, progress = after, time.monotonic()
    while True:
        inbox = bus.connection.new_inbox()
        answers = await bus.connection.subscribe(inbox)
        try:
            pending = 1
            while pending:
                messages, pending = await _batch(bus, answers, stream, subject, seen + 1)
                for message in messages:
                    progress, seen = time.monotonic(), int((message.headers or {})[SEQUENCE])
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
                raise nats.errors.NoRespondersError if status == NOBODY else nats.errors.Error(f"{status} {headers.get('Description', '')}")
