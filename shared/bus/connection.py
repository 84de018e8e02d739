"""The control plane: one NATS connection with deadlines, size checks and confirmed publishing.

Every wait here has a deadline; what a lost connection interrupts is retried within it, and publishing is safe to retry because
messages carry a `Nats-Msg-Id`. Queues are in `shared.bus.work_queue`, what streams look like in `shared.bus.streams`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import nats
import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from shared.bus.bus_errors import ATTEMPT_SECONDS as ATTEMPT_SECONDS
from shared.bus.bus_errors import RETRY_PAUSE as RETRY_PAUSE
from shared.bus.bus_errors import TRANSIENT, WRONG_LAST_SEQUENCE, BusUnreachable, NotPermitted, RequestRefused, WrongSequence
from shared.bus.permission_errors import PermissionErrors, hopeless_reason
from shared.bus.publish_acks import Outgoing, PublishAcks
from shared.runtime import server_urls
from shared.runtime.cancellation import cancelled
from shared.runtime.errors import BadMessage, DeadlineExceeded, MessageTooLarge, MyxoError
from shared.runtime.failures import log_failure
from shared.schema.messages import Message, Refused

Reply = TypeVar("Reply", bound=Message)
Request = TypeVar("Request", bound=Message)

SIZE_MARGIN = 4096
"""Bytes kept free below the server's max_payload: it counts headers, the client does not."""


class Bus:
    """A connection to the run's control plane. Make one with `Bus.connect`, close it with `close`."""

    def __init__(self, connection: Client, url: str, violations: PermissionErrors) -> None:
        self.connection = connection
        self.url = url
        self._violations = violations
        self.js: JetStreamContext = connection.jetstream(timeout=ATTEMPT_SECONDS)
        self._buckets: dict[str, KeyValue] = {}
        self._confirmations = PublishAcks(connection)

    @classmethod
    async def connect(cls, url: str, name: str, deadline: float = 15.0, *, inbox: str = "_INBOX") -> Bus:
        """Connects and proves that JetStream answers.

        Args:
            url: ``nats://[user:password@]host:port`` or ``tls://…``; several separated by commas. ``tls://`` trusts ``MYXO_CA_FILE``.
            name: shown in the server's connection list. deadline: seconds to keep trying.
            inbox: prefix of the subjects that answers come on; an account may listen below its own only (`Subjects.inbox`).

        Raises BusUnreachable with the last reason; at once where the server refuses the credentials or its certificate is not trusted.
        """
        log = structlog.get_logger()
        reasons: list[str] = []
        violations = PermissionErrors(inbox)
        hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def on_error(error: Exception) -> None:
            reasons.append(str(error) or type(error).__name__)
            violations.note(reasons[-1])
            if not hopeless.done() and (why := hopeless_reason(error)):
                hopeless.set_result(why)
            if not isinstance(error, OSError):  # those are the reconnect loop's knocks; the disconnect itself is logged once
                log.warning("bus_error", error=reasons[-1])

        async def on_disconnected() -> None:
            if connection is None or not connection.is_closed:  # not where this side closed it
                log.warning("bus_disconnected")

        async def on_reconnected() -> None:
            log.info("bus_reconnected")

        connection: Client | None = None
        end = time.monotonic() + deadline
        encrypted = any(part.startswith("tls:") for part in url.split(","))
        tls = server_urls.trusted(server_urls.authorities()) if encrypted else None
        while True:
            knock = asyncio.create_task(
                nats.connect(
                    url.split(","),
                    name=name,
                    tls=tls,
                    inbox_prefix=inbox,
                    connect_timeout=2,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RETRY_PAUSE,
                    ping_interval=10,
                    max_outstanding_pings=3,
                    error_cb=on_error,
                    disconnected_cb=on_disconnected,
                    reconnected_cb=on_reconnected,
                    allow_reconnect=True,
                )
            )
            either: set[asyncio.Future[Any]] = {knock, hopeless}
            patience = max(0.5, min(ATTEMPT_SECONDS, end - time.monotonic()))
            try:
                await asyncio.wait(either, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if hopeless.done():
                    raise BusUnreachable(f"the NATS server at {redacted(url)}: {hopeless.result()}")
                connection = await asyncio.wait_for(knock, timeout=0)
            except (TimeoutError, OSError, nats.errors.Error, ValueError) as error:
                if not (isinstance(error, asyncio.TimeoutError) and reasons):  # a knock's own reason says more than "timeout"
                    reasons.append(str(error) or type(error).__name__)
                if time.monotonic() > end or isinstance(error, ValueError):
                    raise BusUnreachable(f"no NATS server at {redacted(url)} within {deadline:g} s ({reasons[-1]})") from error
                await asyncio.sleep(RETRY_PAUSE)
                continue
            finally:
                await cancelled([knock])
            bus = cls(connection, url, violations)
            try:
                await bus._until(end, bus.js.account_info, "JetStream's answer", redacted(url), "$JS.API.INFO")
            except NotPermitted as error:
                await connection.close()
                raise BusUnreachable(str(error)) from error
            except (MyxoError, nats.js.errors.Error) as error:
                await connection.close()
                raise BusUnreachable(f"the NATS server at {redacted(url)} has no JetStream ({error})") from error
            await bus._confirmations.open()
            return bus

    async def close(self) -> None:
        """Closes without waiting for anything in flight. A link that breaks just then is as good as closed."""
        with contextlib.suppress(OSError, nats.errors.Error):
            await self.connection.close()

    # --- publishing

    async def publish(
        self,
        subject: str,
        message: Message,
        *,
        msg_id: str | None = None,
        after: tuple[str, int] | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        deadline: float = 60.0,
    ) -> int:
        """Publishes into a stream and waits for the server's confirmation.

        Args:
            msg_id: makes a repeated publish count once, within the stream's duplicate window.
            after: (stream, its last sequence as this writer knows it): refused when the stream has moved on.
            before: awaited before each try, which is only made while connected. deadline: seconds of retrying.

        Returns the stream sequence. Raises MessageTooLarge, WrongSequence, DeadlineExceeded.
        """
        out = self._outgoing(subject, message, msg_id, after)

        async def once() -> int:
            if before is not None:
                await before()
                if not self.connection.is_connected:  # the client would send it later, whenever it is back
                    raise nats.errors.ConnectionReconnectingError
            try:
                return await (await self._confirmations.send(subject, *out))
            except nats.js.errors.APIError as error:
                if error.err_code in WRONG_LAST_SEQUENCE:
                    if after is not None and msg_id is not None and await self._is_mine(after[0], after[1] + 1, msg_id):
                        return after[1] + 1  # an earlier try went through and only its confirmation was lost
                    raise WrongSequence(f"{subject}: {error.description}; another writer is active") from error
                raise

        return await self._until(time.monotonic() + deadline, once, f"confirmation of {subject}", redacted(self.url), subject)

    async def publish_all(self, subject: str, messages: Mapping[str, Message], *, deadline: float = 60.0) -> None:
        """Publishes messages, by their ``msg_id``, into one stream, and waits until the server has confirmed them all.

        What is not confirmed is sent again, within the deadline. Raises MessageTooLarge before any is sent, DeadlineExceeded.
        """
        left = [self._outgoing(subject, message, msg_id, None) for msg_id, message in messages.items()]

        async def once() -> None:
            nonlocal left
            left, error = await self._confirmations.send_all(subject, left)
            if error is not None:
                raise error

        await self._until(time.monotonic() + deadline, once, f"confirmation of {subject}", redacted(self.url), subject)

    def _outgoing(self, subject: str, message: Message, msg_id: str | None, after: tuple[str, int] | None) -> Outgoing:
        headers: dict[str, str] = {} if msg_id is None else {"Nats-Msg-Id": msg_id}
        if after is not None:
            headers["Nats-Expected-Last-Sequence"] = str(after[1])
        payload = message.encode()
        self._check_size(subject, payload, headers)
        return payload, headers or None

    async def _is_mine(self, stream: str, sequence: int, msg_id: str) -> bool:
        """Whether the stream's message at ``sequence`` is the one published as ``msg_id``."""
        try:
            stored = await self.js.get_msg(stream, sequence)
        except nats.js.errors.NotFoundError:
            return False
        return (stored.headers or {}).get("Nats-Msg-Id") == msg_id

    def _check_size(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        size = len(payload) + sum(len(key) + len(value) + 4 for key, value in headers.items())
        limit = self.connection.max_payload - SIZE_MARGIN
        if size > limit:
            raise MessageTooLarge(f"{size} bytes for {subject} are over the bus's limit of {limit}; payloads belong in the store")

    # --- request and reply

    async def request(
        self, subject: str, message: Message, reply: type[Reply], *, deadline: float, whom: str, patient: bool = True
    ) -> Reply:
        """Asks and waits for the answer.

        Args:
            reply: the message class (or base class) expected back.
            deadline: seconds in all. whom: who should answer, for the error.
            patient: retry while nobody listens on the subject (only for idempotent requests).

        Raises RequestRefused when the other side declines, DeadlineExceeded, BadMessage.
        """
        payload = message.encode()
        self._check_size(subject, payload, {})
        start = time.monotonic()
        end = start + deadline

        async def once() -> Msg:
            remaining = max(0.05, end - time.monotonic())
            return await self.connection.request(subject, payload, timeout=min(remaining, ATTEMPT_SECONDS) if patient else remaining)

        if patient:
            answer = await self._until(end, once, f"an answer on {subject}", whom, subject)
        else:
            try:
                answer = await once()
            except TRANSIENT as error:
                self.raise_if_refused(start, subject)
                if isinstance(error, nats.errors.NoRespondersError):
                    waited = round(time.monotonic() - start, 3)
                    raise DeadlineExceeded(f"an answer on {subject}", whom, waited, "nobody listens there") from error
                raise DeadlineExceeded(f"an answer on {subject}", whom, deadline, "given up") from error
        message_back = Message.decode(answer.data)
        if isinstance(message_back, Refused):
            raise RequestRefused(f"{whom}: {message_back.reason}")
        if not isinstance(message_back, reply):
            raise BadMessage(f"{whom} answered {subject} with a {type(message_back).__name__} where {reply.__name__} was expected")
        return message_back

    async def ask(self, subject: str, payload: bytes, *, deadline: float, whom: str) -> bytes:
        """Asks somebody who speaks no `Message`s: bytes there and back, tried once.

        Raises NoRespondersError where nobody listens on the subject, DeadlineExceeded, MessageTooLarge, NotPermitted.
        """
        self._check_size(subject, payload, {})
        start = time.monotonic()
        try:
            return bytes((await self.connection.request(subject, payload, timeout=deadline)).data)
        except nats.errors.NoRespondersError:
            raise
        except TRANSIENT as error:
            self.raise_if_refused(start, subject)
            raise DeadlineExceeded(f"an answer on {subject}", whom, deadline, "given up") from error

    async def serve(self, subject: str, request: type[Request], handler: Callable[[Request], Awaitable[Message]]) -> None:
        """Answers requests on ``subject`` until the connection closes; a `MyxoError` of the handler becomes a `Refused`.

        Handlers run as tasks of their own, so a slow one does not hold up the next request. Raises NotPermitted.
        """
        log = structlog.get_logger()
        running: set[asyncio.Task[None]] = set()

        async def answer(message: Msg) -> None:
            try:
                reply = (await handler(request.decode(message.data))).encode()
                self._check_size(f"an answer on {message.subject}", reply, {})
            except MyxoError as error:
                log.warning("request_refused", subject=message.subject, reason=str(error))
                reply = Refused(reason=str(error)).encode()
            except Exception as error:
                log.exception("request_failed", subject=message.subject)
                reply = Refused(reason=f"internal error: {type(error).__name__}: {error}").encode()
            try:
                await message.respond(reply)
            except TRANSIENT as error:
                log.warning("reply_lost", subject=message.subject, error=str(error))

        async def on_message(message: Msg) -> None:
            task = asyncio.create_task(answer(message))
            running.add(task)
            task.add_done_callback(running.discard)
            log_failure(task, f"answering on {subject}")

        start = time.monotonic()
        await self.connection.subscribe(subject, cb=on_message)
        with contextlib.suppress(*TRANSIENT):  # a link that broke just now subscribes again when it is back
            for _ in range(2):  # the client's ping overtakes what it has not sent yet; a refusal comes before the second one's answer
                await self.connection.flush(timeout=int(ATTEMPT_SECONDS))
        self.raise_if_refused(start, subject)

    # --- what the account does not have

    def raise_if_refused(self, start: float, *subjects: str) -> None:
        """Raises NotPermitted where the server has refused this client a subject that begins like one of these since ``start``.

        Args:
            start: `time.monotonic()` before the attempt.
        """
        if words := self._violations.since(start, *subjects):
            raise NotPermitted(f"the NATS server at {redacted(self.url)} refuses this account: {words}")

    # --- key-value

    async def put(self, bucket: str, key: str, value: bytes, *, deadline: float = 15.0) -> int:
        """Writes a key; returns its revision."""
        store, end, what = await self._bucket(bucket), time.monotonic() + deadline, f"KV {bucket}/{key}"
        return await self._until(end, lambda: store.put(key, value), what, redacted(self.url), f"$KV.{bucket}.{key}")

    async def get(self, bucket: str, key: str, *, deadline: float = 15.0) -> bytes | None:
        """Reads a key; None where it is absent."""
        store = await self._bucket(bucket)

        async def once() -> bytes | None:
            try:
                return (await store.get(key)).value
            except (nats.js.errors.KeyNotFoundError, nats.js.errors.KeyDeletedError):
                return None

        end, subject = time.monotonic() + deadline, f"$JS.API.STREAM.MSG.GET.KV_{bucket}"
        return await self._until(end, once, f"KV {bucket}/{key}", redacted(self.url), subject)

    async def delete(self, bucket: str, key: str, *, deadline: float = 5.0) -> None:
        """Removes a key; absent is fine."""
        store, end, what = await self._bucket(bucket), time.monotonic() + deadline, f"KV {bucket}/{key}"
        await self._until(end, lambda: store.delete(key), what, redacted(self.url), f"$KV.{bucket}.{key}")

    async def keys(self, bucket: str, *, deadline: float = 15.0) -> list[str]:
        """The live keys of a bucket."""
        prefix = f"$KV.{bucket}."

        async def once() -> list[str]:
            info = await self.js.stream_info(f"KV_{bucket}", subjects_filter=f"{prefix}>")
            return sorted(subject.removeprefix(prefix) for subject in (info.state.subjects or {}))

        end, subject = time.monotonic() + deadline, f"$JS.API.STREAM.INFO.KV_{bucket}"
        return await self._until(end, once, f"keys of KV {bucket}", redacted(self.url), subject)

    async def _bucket(self, bucket: str) -> KeyValue:
        if bucket not in self._buckets:
            end, subject = time.monotonic() + 15, f"$JS.API.STREAM.INFO.KV_{bucket}"
            try:
                self._buckets[bucket] = await self._until(
                    end, lambda: self.js.key_value(bucket), f"KV bucket {bucket}", redacted(self.url), subject
                )
            except nats.js.errors.BucketNotFoundError as error:
                raise MyxoError(f"the bus has no KV bucket {bucket}: does the run exist there? (`myxo up` makes it)") from error
        return self._buckets[bucket]

    async def _until(self, end: float, once: Callable[[], Awaitable[Result]], what: str, whom: str, *subjects: str) -> Result:
        """Tries ``once`` until it works, ``end`` (monotonic seconds) passes, or the server refuses one of the ``subjects``."""
        start = time.monotonic()
        while True:
            try:
                return await once()
            except TRANSIENT as error:
                self.raise_if_refused(start, *subjects)
                if time.monotonic() + RETRY_PAUSE > end or self.connection.is_closed:
                    raise DeadlineExceeded(what, whom, round(end - start, 1), f"given up ({type(error).__name__})") from error
            await asyncio.sleep(RETRY_PAUSE)


Result = TypeVar("Result")


@functools.lru_cache(maxsize=8)
def redacted(url: str) -> str:
    """A URL without its credentials, for logs and errors."""
    return ",".join(re.sub(r"^(.*//)?.*@", r"\1", part) for part in url.split(","))
