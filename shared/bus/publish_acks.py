"""Publishes into streams and awaits many acknowledgements at once.

Every message gets its acknowledgement on a numbered subject below one inbox of the connection, and one timer covers all of them. That is
a fraction of the work of a request for each, and two thirds of that of the client library's own ``publish_async``
(docs/dependencies.md).
"""

import asyncio
import json
import time
from collections.abc import Sequence

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import Header

from shared.bus.bus_errors import ATTEMPT_SECONDS, STREAM_FULL, TRANSIENT

Outgoing = tuple[bytes, dict[str, str] | None]
"""A message to publish into a stream: payload and headers."""

NO_RESPONDERS = "503"


class PublishAcks:
    """The acknowledgements that one connection awaits. `open` is called before the first `send`."""

    def __init__(self, connection: Client) -> None:
        self._connection = connection
        self._prefix = f"{connection.new_inbox()}."
        self._awaited: dict[str, tuple[float, asyncio.Future[int]]] = {}  # deadlines and futures by index, oldest first
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        await self._connection.subscribe(f"{self._prefix}*", cb=self._take)

    async def send(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> asyncio.Future[int]:
        """Publishes and returns at once; the future's result is the stream's sequence.

        The future raises nats.errors.TimeoutError after `ATTEMPT_SECONDS` and if the stream is full, NoStreamResponseError if no
        stream stores the subject, and the APIError with which the server refuses the message.
        """
        self._sent += 1
        index, ack = str(self._sent), asyncio.get_running_loop().create_future()
        self._awaited[index] = (time.monotonic() + ATTEMPT_SECONDS, ack)
        if self._timer is None:
            self._expire_after(ATTEMPT_SECONDS)
        try:
            await self._connection.publish(subject, payload, self._prefix + index, headers)
        except BaseException:
            self._awaited.pop(index, None)
            raise
        return ack

    async def send_all(self, subject: str, messages: Sequence[Outgoing]) -> tuple[list[Outgoing], BaseException | None]:
        """Publishes all messages and waits for their acknowledgements.

        Returns those without one, and the first error; an error that another attempt cannot help comes before all others.
        """
        sent: list[asyncio.Future[int]] = []
        try:
            for message in messages:
                sent.append(await self.send(subject, *message))
            if sent:
                await asyncio.wait(sent)
        except BaseException:
            for ack in sent:
                ack.cancel()
            raise
        failed = {index: error for index, ack in enumerate(sent) if (error := ack.exception()) is not None}
        lasting = [error for error in failed.values() if not isinstance(error, TRANSIENT)]
        return [messages[index] for index in failed], next(iter([*lasting, *failed.values()]), None)

    async def _take(self, message: Msg) -> None:
        _, ack = self._awaited.pop(message.subject[len(self._prefix) :], (0.0, None))
        if ack is None or ack.done():  # too late, or nobody waits any more
            return
        if message.headers and message.headers.get(Header.STATUS) == NO_RESPONDERS:
            ack.set_exception(nats.js.errors.NoStreamResponseError())
            return
        answer = json.loads(message.data)
        if "error" not in answer:
            ack.set_result(int(answer["seq"]))
            return
        try:
            nats.js.errors.APIError.from_error(answer["error"])
        except nats.js.errors.APIError as error:
            full = error.err_code in STREAM_FULL  # back-pressure: the caller tries again, within its deadline
            ack.set_exception(nats.errors.TimeoutError() if full else error)

    def _expire_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Fails the overdue acknowledgements, and sets the timer for the next one."""
        now, self._timer = time.monotonic(), None
        while self._awaited:
            index, (end, ack) = next(iter(self._awaited.items()))
            if end > now and not ack.done():
                self._expire_after(end - now)
                return
            del self._awaited[index]
            if not ack.done():
                ack.set_exception(nats.errors.TimeoutError())
