"""Work queues: a lease with a deadline is extended while the work goes on, and handed back or declared dead when the work fails.

Delivery is at-least-once: whoever takes work from a queue is idempotent by the id in the message. A lease that was delivered more
than `max_deliver` times has killed or outlived its workers; the worker that receives it once more declares it dead instead of trying.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.bus.bus_errors import ATTEMPT_SECONDS, RETRY_PAUSE, TRANSIENT
from shared.bus.connection import Bus
from shared.bus.streams import Consumer
from shared.runtime.errors import BadMessage
from shared.runtime.failures import log_failure
from shared.schema.messages import Message

Work = TypeVar("Work", bound=Message)

FETCH_SECONDS = 1.0
"""How long one pull waits at the server, and so how often at least a worker sees whether it is to stop."""

FETCH_BYTES = 4 << 20
"""The most that one pull brings."""


class MessageLease(Generic[Work]):
    """One message that this worker holds until it acks, hands back, or its `ack_wait` runs out unextended."""

    def __init__(self, raw: Msg, message: Work, consumer: Consumer) -> None:
        self._raw, self.message, self._consumer = raw, message, consumer

    @property
    def deliveries(self) -> int:
        """Returns how often the message was handed out, this time included."""
        return self._raw.metadata.num_delivered

    @property
    def exhausted(self) -> bool:
        """Returns whether it was delivered more often than the queue allows: then declare it dead, do not try again."""
        return self.deliveries > self._consumer.max_deliver

    async def ack(self) -> None:
        """Says that the work is done. A lost ack means a redelivery, which idempotence absorbs."""
        with contextlib.suppress(*TRANSIENT):
            await self._raw.ack()

    async def hand_back(self, delay: float = 0.0) -> None:
        """Gives the work to somebody else, after ``delay`` seconds."""
        with contextlib.suppress(*TRANSIENT):
            await self._raw.nak(delay=delay or None)

    async def extend(self) -> None:
        """Starts the lease's `ack_wait` anew."""
        with contextlib.suppress(*TRANSIENT):
            await self._raw.in_progress()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Extends the lease every third of its `ack_wait` for as long as the body runs."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._consumer.ack_wait / 3)
                await self.extend()

        task = asyncio.create_task(renew())
        log_failure(task, "extending a lease")
        try:
            yield
        finally:
            task.cancel()


class WorkQueue(Generic[Work]):
    """One durable consumer of a work-queue stream, shared by all workers of its kind."""

    def __init__(self, bus: Bus, consumer: Consumer, model: type[Work]) -> None:
        self._bus, self._consumer, self._model = bus, consumer, model
        self._pull: Pull | None = None

    async def fetch(self, most: int, seconds: float = FETCH_SECONDS) -> list[MessageLease[Work]]:
        """Returns up to ``most`` leases, as soon as there is one; none where none came within ``seconds`` or the bus is away for now.

        A message that cannot be read is logged with its reason and removed, so that it blocks nobody. Raises NotPermitted.
        """
        start = time.monotonic()
        try:
            if self._pull is None:
                self._pull = await Pull.open(self._bus, self._consumer.stream, self._consumer.name)
            raw = await self._pull.fetch(most, seconds)
        except (*TRANSIENT, nats.errors.Error, nats.js.errors.Error) as error:
            structlog.get_logger().warning("fetch_failed", queue=self._consumer.name, error=str(error) or type(error).__name__)
            await asyncio.sleep(RETRY_PAUSE * 5)
            return []
        if not raw:
            self._bus.raise_if_refused(start, self._pull.request_subject)
        leases = []
        for message in raw:
            try:
                leases.append(MessageLease(message, self._model.decode(message.data), self._consumer))
            except BadMessage as error:
                structlog.get_logger().error("message_unreadable", queue=self._consumer.name, error=str(error))
                await message.term()
        return leases

    async def depth(self, deadline: float = 5.0) -> tuple[int, int]:
        """Returns how many messages wait, and how many are in workers' hands."""
        stream, name = self._consumer.stream, self._consumer.name
        info = await self._bus.retry(
            lambda: self._bus.js.consumer_info(stream, name), f"depth of {name}", f"$JS.API.CONSUMER.INFO.{stream}", deadline=deadline
        )
        return info.num_pending or 0, info.num_ack_pending or 0


class Pull:
    """Pull requests on a durable consumer, never for more than the caller has room for.

    The client library's own fetch waits for a full batch when fewer messages are there; this one takes what is there at once, and
    waits for a single message only when nothing is. Protocol: NATS ADR-13 (no_wait, expires, status 404/408/409).
    """

    def __init__(self, connection: Client, inbox: str, request_subject: str) -> None:
        self._connection, self._inbox, self.request_subject = connection, inbox, request_subject
        self._requests = 0
        self._lock = asyncio.Lock()
        self._expects_more = True  # as far as the last fetch could tell: else asking without waiting is a round trip for nothing
        self._received: deque[Msg] = deque()
        self._arrival: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, bus: Bus, stream: str, consumer: str) -> "Pull":
        inbox = bus.connection.new_inbox()
        pull = cls(bus.connection, inbox, f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}")
        await bus.connection.subscribe(f"{inbox}.*", cb=pull._take)
        return pull

    async def fetch(self, most: int, seconds: float) -> list[Msg]:
        """Returns up to ``most`` messages, of `FETCH_BYTES` in all: those that are there, else the first that comes within ``seconds``."""
        async with self._lock:
            got: list[Msg] = []
            if self._expects_more or seconds <= 0:
                got = await self._request(most, None, ATTEMPT_SECONDS)
            if not got and seconds > 0:
                got = await self._request(1, seconds, seconds + RETRY_PAUSE)
                if got and most > 1:
                    got += await self._request(most - 1, None, ATTEMPT_SECONDS)
            self._expects_more = len(got) == most
            return got

    async def _request(self, batch: int, expires: float | None, seconds: float) -> list[Msg]:
        self._requests += 1
        reply = f"{self._inbox}.{self._requests}"
        request: dict[str, object] = {"batch": batch, "max_bytes": FETCH_BYTES}
        request |= {"no_wait": True} if expires is None else {"expires": int(expires * 1e9)}
        await self._connection.publish(self.request_subject, json.dumps(request).encode(), reply)
        got: list[Msg] = []
        end = time.monotonic() + seconds
        while await self._arrived(end):
            while self._received and len(got) < batch:
                message = self._received.popleft()
                if not message.subject.startswith(self._inbox):
                    got.append(message)
                elif message.subject == reply:
                    return got  # this request's end: nothing more there, expired, or `FETCH_BYTES` reached
            if len(got) == batch:
                return got
        return got  # where the server went away in between: what it had sent comes again when its ack_wait is over

    async def _arrived(self, end: float) -> bool:
        """Waits until something has come; returns False where nothing did by ``end`` (monotonic)."""
        if not self._received:
            if self._connection.is_closed:
                raise nats.errors.ConnectionClosedError
            self._arrival = asyncio.get_running_loop().create_future()
            timer = asyncio.get_running_loop().call_later(max(0.001, end - time.monotonic()), self._wake)
            try:
                await self._arrival
            finally:
                timer.cancel()
                self._arrival = None
        return bool(self._received)

    async def _take(self, message: Msg) -> None:
        self._received.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
