"""Work queues: a message is leased with a deadline, which is extended during the work, and returned or declared dead if the work fails.

Delivery is at-least-once: workers are idempotent by the id in the message. If a message was delivered more than `max_deliver` times, its
workers died or let it run out each time; the next worker that receives it declares it dead instead of trying.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.bus.bus_errors import ATTEMPT_SECONDS, RETRY_PAUSE, TRANSIENT
from shared.bus.connection import Bus
from shared.bus.streams import SPARE_DELIVERIES, Consumer
from shared.runtime.errors import BadMessage
from shared.runtime.tasks import log_failure
from shared.schema.messages import Failed, Message, failure_of

Work = TypeVar("Work", bound=Message)
GiveUp = Callable[[Failed], Awaitable[None]]
FETCH_SECONDS = 1.0  # The seconds that one pull waits at the server; a worker checks at least this often whether it is to stop
FETCH_BYTES = 4 << 20  # The most bytes that one pull returns, beside one message of any size: a server delivers none that is larger


class MessageLease(Generic[Work]):
    """A message that this worker holds until it acks it, hands it back, or `ack_wait` runs out without an extension."""

    def __init__(self, raw: Msg, message: Work, consumer: Consumer) -> None:
        self._raw, self.message, self._consumer = raw, message, consumer

    @property
    def subject(self) -> str:
        """Returns the subject that it was published on, which says whose account it came from."""
        return self._raw.subject

    @property
    def deliveries(self) -> int:
        """Returns how often the message was delivered, this time included."""
        return self._raw.metadata.num_delivered

    @property
    def published(self) -> int:
        """Returns when the server took the message, by its clock: nanoseconds since the epoch."""
        return int(self._raw.metadata.timestamp.timestamp() * 1e9)

    @property
    def exhausted(self) -> bool:
        """Returns whether it was delivered more often than the queue allows; it is then declared dead instead of tried again."""
        return self.deliveries > self._consumer.settings.max_deliver

    @property
    def last(self) -> bool:
        """Returns whether the bus will not deliver it again."""
        return self.deliveries >= self._consumer.settings.max_deliver + SPARE_DELIVERIES

    async def ack(self) -> None:
        """Acknowledges that the work is done. After a lost ack the message is delivered again; workers are idempotent."""
        with contextlib.suppress(*TRANSIENT):
            await self._raw.ack()

    async def hand_back(self, delay: float = 0.0) -> None:
        """Returns the message to the queue, for another worker after ``delay`` seconds."""
        with contextlib.suppress(*TRANSIENT):
            await self._raw.nak(delay=delay or None)

    async def extend(self) -> None:
        """Restarts the lease's `ack_wait`."""
        with contextlib.suppress(*TRANSIENT):
            await self._raw.in_progress()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Extends the lease every third of its `ack_wait` for as long as the body runs."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._consumer.settings.ack_wait / 3)
                await self.extend()

        task = asyncio.create_task(renew())
        log_failure(task, "extending a lease")
        try:
            yield
        finally:
            task.cancel()


class WorkQueue(Generic[Work]):
    """One durable consumer of a work-queue stream, shared by all workers of its kind.

    Args:
        give_up: is awaited with the failure of each group of which a message cannot be decoded, before that leaves the queue.
        by: who gives it up.
    """

    def __init__(self, bus: Bus, consumer: Consumer, model: type[Work], give_up: GiveUp | None = None, by: str = "") -> None:
        self._bus, self._consumer, self._model, self._give_up, self._by = bus, consumer, model, give_up, by
        self._pull: Pull | None = None

    async def fetch(self, most: int, seconds: float = FETCH_SECONDS) -> list[MessageLease[Work]]:
        """Returns up to ``most`` leases, as soon as there is one; none if none came within ``seconds`` or the bus is unreachable.

        A message that cannot be decoded is logged with its reason and removed from the queue. What comes while this is
        cancelled goes back to it. Raises NotPermitted.
        """
        start = time.monotonic()
        try:
            if self._pull is None:
                self._pull = Pull(self._bus.connection, self._consumer.stream, self._consumer.name)
            raw = await self._pull.fetch(most, seconds)
        except (*TRANSIENT, nats.errors.Error, nats.js.errors.Error) as error:
            structlog.get_logger().warning("fetch_failed", queue=self._consumer.name, error=str(error) or type(error).__name__)
            await asyncio.sleep(RETRY_PAUSE * 5)
            return []
        if not raw:
            self._bus.raise_if_refused(start, self._pull.request_subject)
            # the server ends at once what it has no room or no leader for; an ordinary pull has waited so long already
            await asyncio.sleep(min(seconds, FETCH_SECONDS) - (time.monotonic() - start))
        return [lease for message in raw if (lease := await self._lease(message)) is not None]

    async def _lease(self, message: Msg) -> MessageLease[Work] | None:
        self._bus.note_server_time(message.metadata.timestamp.timestamp())
        try:
            return MessageLease(message, self._model.decode(message.data), self._consumer)
        except BadMessage as error:
            structlog.get_logger().error("message_unreadable", queue=self._consumer.name, error=str(error))
            if self._give_up is not None and (failed := failure_of(message.data, str(error), self._by)) is not None:
                await self._give_up(failed)
            with contextlib.suppress(*TRANSIENT):
                await message.term()
            return None

    async def depth(self, deadline: float = 5.0) -> tuple[int, int]:
        """Returns how many messages wait, and how many are leased to workers."""
        stream, name = self._consumer.stream, self._consumer.name
        info = await self._bus.retry(
            lambda: self._bus.js.consumer_info(stream, name), f"depth of {name}", f"$JS.API.CONSUMER.INFO.{stream}", deadline=deadline
        )
        return info.num_pending or 0, info.num_ack_pending or 0


class Pull:
    """Pull requests on a durable consumer, each for at most as many messages as the caller has room for.

    The client library's own fetch waits for a full batch when fewer messages are available; this one takes those that are, and waits
    only if there are none, for a single message. Protocol: NATS ADR-13 (no_wait, expires, status 404/408/409).
    """

    def __init__(self, connection: Client, stream: str, consumer: str) -> None:
        self._connection, self._inbox = connection, ""
        self.request_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._requests = 0
        self._lock = asyncio.Lock()
        self._expects_more = True  # as of the last fetch; on an empty queue a request without waiting is a wasted round trip
        self._received: asyncio.Queue[Msg] = asyncio.Queue()
        self._got: list[Msg] = []  # by the fetch that runs
        self._subscription: Subscription | None = None

    async def fetch(self, most: int, seconds: float) -> list[Msg]:
        """Returns up to ``most`` messages, within its bytes: the available ones, else the first that arrives within ``seconds``.

        Where it is cancelled, messages that have come, or that come, go back to the queue.
        """
        async with self._lock:
            if self._subscription is None:
                self._inbox = self._connection.new_inbox()
                self._subscription = await self._connection.subscribe(f"{self._inbox}.*", cb=self._received.put)
            self._got = []  # what a fetch that failed had is delivered again after its ack_wait
            try:
                if self._expects_more or seconds <= 0:
                    await self._request(most, None, ATTEMPT_SECONDS)
                if not self._got and seconds > 0:
                    await self._request(1, seconds, seconds + RETRY_PAUSE)
                    if self._got and most > 1:
                        await self._request(most - 1, None, ATTEMPT_SECONDS)
            except asyncio.CancelledError:
                await self._leave(self._subscription)
                raise
            self._expects_more = len(self._got) == most
            return self._got

    async def _leave(self, subscription: Subscription) -> None:
        self._subscription = None
        with contextlib.suppress(*TRANSIENT, nats.errors.Error):
            await subscription.unsubscribe()  # to a request without a listener the server sends nothing
            while not self._received.empty():
                self._got.append(self._received.get_nowait())
            for message in self._got:
                if not message.subject.startswith(self._inbox):
                    await message.nak()

    async def _request(self, batch: int, expires: float | None, seconds: float) -> None:
        self._requests += 1
        reply = f"{self._inbox}.{self._requests}"
        request: dict[str, object] = {"batch": batch, "max_bytes": FETCH_BYTES + self._connection.max_payload}
        request |= {"no_wait": True} if expires is None else {"expires": int(expires * 1e9)}
        await self._connection.publish(self.request_subject, json.dumps(request).encode(), reply)
        whole = len(self._got) + batch
        with contextlib.suppress(TimeoutError):  # messages that a lost server had sent are delivered again after their ack_wait
            async with asyncio.timeout(seconds):
                while len(self._got) < whole:
                    message = await self._received.get()
                    if not message.subject.startswith(self._inbox):
                        self._got.append(message)
                    elif message.subject == reply:
                        break  # the end of this request: no more messages, expired, or its bytes reached
