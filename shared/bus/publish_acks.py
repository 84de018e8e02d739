"""Publishes into streams and awaits many acknowledgements at once.

Every message gets its acknowledgement on a numbered subject below one inbox of the connection, and one timer covers all that are published
together. That is a fraction of the work of a request for each, and two thirds of that of the client library's own ``publish_async``
(docs/dependencies.md).
"""

import asyncio
import json
from collections.abc import Sequence

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import Header

from shared.bus.bus_errors import ATTEMPT_SECONDS

Outgoing = tuple[bytes, dict[str, str] | None]
"""A message to publish into a stream: payload and headers."""

Ack = int | Exception
"""The stream's sequence, or why there is none: TimeoutError after `ATTEMPT_SECONDS`, NoStreamResponseError if no stream stores the subject,
or the APIError with which the server refuses the message."""

NO_RESPONDERS = "503"


class PublishAcks:
    """The acknowledgements that one connection awaits. `open` is called before the first `publish`."""

    def __init__(self, connection: Client) -> None:
        self._connection = connection
        self._prefix = ""
        self._awaited: dict[str, asyncio.Future[Ack]] = {}
        self._sent = 0

    async def open(self) -> None:
        self._prefix = f"{self._connection.new_inbox()}."
        await self._connection.subscribe(f"{self._prefix}*", cb=self._take)

    async def publish(self, subject: str, messages: Sequence[Outgoing]) -> list[Ack]:
        """Publishes messages and returns the acknowledgement of each. Raises as the connection does, of which any may have been sent."""
        acks: dict[str, asyncio.Future[Ack]] = {}
        try:
            for payload, headers in messages:
                self._sent += 1
                index = str(self._sent)
                acks[index] = self._awaited[index] = asyncio.get_running_loop().create_future()
                await self._connection.publish(subject, payload, self._prefix + index, headers)
            await asyncio.wait(acks.values(), timeout=ATTEMPT_SECONDS)
        finally:
            for index in acks:
                self._awaited.pop(index, None)
        return [ack.result() if ack.done() else nats.errors.TimeoutError() for ack in acks.values()]

    async def _take(self, message: Msg) -> None:
        ack = self._awaited.pop(message.subject[len(self._prefix) :], None)
        if ack is not None:  # else it is too late, or nobody waits any more
            ack.set_result(_parsed(message))


def _parsed(message: Msg) -> Ack:
    if message.headers and message.headers.get(Header.STATUS) == NO_RESPONDERS:
        return nats.js.errors.NoStreamResponseError()
    answer = json.loads(message.data)
    if "error" not in answer:
        return int(answer["seq"])
    try:
        nats.js.errors.APIError.from_error(answer["error"])
    except nats.js.errors.APIError as error:
        return error
    raise AssertionError  # from_error always raises
