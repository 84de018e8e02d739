"""The control plane: one NATS connection with deadlines, size checks and confirmed publishing.

Every wait here has a deadline, within which calls that a lost connection interrupts are retried. Publishing is safe to retry because
messages carry a `Nats-Msg-Id`. Queues are in `shared.bus.work_queue`, the definitions of streams in `shared.bus.streams`.
"""

import asyncio
import contextlib
import functools
import json
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import Header
from nats.js.kv import KeyValue

from shared.bus.bus_errors import (
    ATTEMPT_SECONDS,
    RETRY_PAUSE,
    TRANSIENT,
    UNCONFIRMED_ATTEMPTS,
    WRONG_LAST_SEQUENCE,
    BusUnreachable,
    NotPermitted,
    RequestRefused,
    StreamFull,
    Unconfirmed,
    WrongSequence,
    full_reason,
    hopeless_reason,
    redacted,
)
from shared.runtime import addresses
from shared.runtime.back_pressure import RETRY_PAUSE_S, BackPressure
from shared.runtime.errors import BadMessage, DeadlineExceeded, MessageTooLarge, MyxoError
from shared.runtime.host import clock
from shared.runtime.tasks import cancelled, log_failure
from shared.schema.messages import Message, Refused

REMEMBERED_REFUSALS = 256
_REFUSAL = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]*)"')


class NatsClient:
    """A connection that is restored whenever it breaks: ``restored_s``, monotonic seconds, 0: never. ``js``: its JetStream."""

    def __init__(self, url: str, inbox: str) -> None:
        self.url, self._inbox = url, inbox
        self.connection = Client()
        self.js: JetStreamContext = self.connection.jetstream(timeout=ATTEMPT_SECONDS)
        self.restored_s = 0.0
        self._restored = asyncio.Event()  # replaced by another each time
        self._refusals: deque[tuple[float, str, str]] = deque(maxlen=REMEMBERED_REFUSALS)  # they arrive apart from the unanswered request
        self._last_error = "no answer"
        self._hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._log = structlog.get_logger()

    async def _open(self, name: str, deadline: float) -> None:
        """Connects. Raises BusUnreachable after ``deadline`` seconds, or at once if another attempt cannot help."""
        encrypted = any(part.startswith("tls:") for part in self.url.split(","))
        opened = asyncio.create_task(
            self.connection.connect(
                self.url.split(","),
                name=name,
                tls=addresses.trusted(addresses.authorities()) if encrypted else None,
                inbox_prefix=self._inbox,
                connect_timeout=2,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RETRY_PAUSE,  # type: ignore[arg-type]
                ping_interval=10,
                max_outstanding_pings=3,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                allow_reconnect=True,
            )
        )
        either: set[asyncio.Future[Any]] = {opened, self._hopeless}
        try:
            await asyncio.wait(either, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
            if self._hopeless.done():
                await self.until_refused()
            if opened.done():
                return opened.result()
        except (OSError, nats.errors.Error, ValueError) as error:  # what the library does not try again, such as a URL that is none
            self._last_error = str(error)
        finally:
            await cancelled([opened])
        raise BusUnreachable(f"no NATS server at {redacted(self.url)} within {deadline:g} s ({self._last_error})")

    async def until_refused(self, lasting: float = 0.0) -> None:
        """Waits until no server has let this client in again for ``lasting`` seconds. Raises BusUnreachable then."""
        while True:
            refusal = self._hopeless
            reason = await asyncio.shield(refusal)
            await asyncio.sleep(lasting)
            if refusal is self._hopeless:
                raise BusUnreachable(f"the NATS server at {redacted(self.url)}: {reason}", refused=True)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        if found := _REFUSAL.search(self._last_error.lower()):
            self._refusals.append((time.monotonic(), found[1], self._last_error))
        if not self._hopeless.done() and (reason := hopeless_reason(error)):
            self._hopeless.set_result(reason)
        if not isinstance(error, OSError):  # these come from the attempts of the reconnect loop; the disconnect itself is logged once
            self._log.warning("bus_error", error=self._last_error)

    async def _on_disconnected(self) -> None:
        if not self.connection.is_closed:
            self._log.warning("bus_disconnected")
        elif not self._hopeless.done():  # not closed by this side, and the library does not connect again
            self._hopeless.set_result(f"it has ended the connection ({self.connection.last_error})")

    async def _on_reconnected(self) -> None:
        self.restored_s = time.monotonic()
        if self._hopeless.done():
            self._hopeless = asyncio.get_running_loop().create_future()
        self._restored.set()
        self._restored = asyncio.Event()
        self._log.info("bus_reconnected")

    async def _request_once(self, subject: str, payload: bytes, seconds: float) -> bytes:
        """Sends a request once and returns the answer. Raises one of `TRANSIENT` without it, at once when the connection was restored
        meanwhile: what was under way when it broke is lost, the request or its answer."""
        asked = asyncio.ensure_future(self.connection.request(subject, payload, timeout=seconds))
        restored = asyncio.ensure_future(self._restored.wait())
        try:
            await asyncio.wait({asked, restored}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return bytes(asked.result().data)
            raise nats.errors.StaleConnectionError
        finally:
            await cancelled([asked, restored])

    async def close(self) -> None:
        """Closes without waiting for anything in flight. A connection that breaks meanwhile counts as closed."""
        self._hopeless.cancel()  # what ends the connection from now on is this side
        if (reconnecting := self.connection._reconnection_task) is not None:
            await cancelled([reconnecting])  # the library does so once, and its loop may go on
        with contextlib.suppress(OSError, nats.errors.Error):
            await self.connection.close()

    aclose = close  # for contextlib.aclosing

    def raise_if_refused(self, start: float, *subjects: str) -> None:
        """Raises NotPermitted if the server has refused this client a subject with one of these prefixes since ``start`` (monotonic)."""
        prefixes = tuple(subject.lower() for subject in (self._inbox, *subjects))  # the library converts the server's text to lower case
        for at, subject, text in self._refusals:
            if at >= start and subject.startswith(prefixes):
                raise NotPermitted(f"the NATS server at {redacted(self.url)} refuses this account: {text}")


Outgoing = tuple[bytes, dict[str, str] | None]  # A message to publish into a stream: payload and headers

# The stream's sequence, or why there is none: TimeoutError after `ATTEMPT_SECONDS`, NoStreamResponseError if no stream stores the subject,
# or the APIError with which the server refuses the message
Ack = int | Exception
NO_RESPONDERS = "503"


class PublishAcks:
    """Publishes into streams and awaits many acknowledgements at once. `open` is called before the first `publish`.

    Every message gets its acknowledgement on a numbered subject below one inbox, and one timer covers all that are published together: a
    fraction of the work of a request for each, and two thirds of that of the library's own ``publish_async`` (docs/dependencies.md).
    """

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
        if (ack := self._awaited.pop(message.subject[len(self._prefix) :], None)) is not None:  # else it is too late
            ack.set_result(_acknowledgement(message))


def _acknowledgement(message: Msg) -> Ack:
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


Reply = TypeVar("Reply", bound=Message)
Request = TypeVar("Request", bound=Message)
Result = TypeVar("Result")
SIZE_MARGIN = 4096  # Bytes kept free below the server's max_payload: it counts headers, the client does not
KV_SECONDS = 15.0  # The deadline of reading, writing and listing keys, if the caller gives none


class Bus(NatsClient):
    """A connection to the run's control plane, opened by `Bus.connect` and closed by `close`."""

    def __init__(self, url: str, inbox: str) -> None:
        super().__init__(url, inbox)
        self._acks = PublishAcks(self.connection)
        self._buckets: dict[str, KeyValue] = {}
        self.full = BackPressure()
        self._clock_ahead = math.inf  # seconds that `clock`, which no step of this machine's time moves, is ahead of the server's at most

    def note_server_time(self, published: float) -> None:
        """Notes when the server took a message that has just come, seconds since the epoch."""
        self._clock_ahead = min(self._clock_ahead, clock() - published)

    def now(self) -> float:
        """Returns the server's time, seconds since the epoch, as far as its messages tell. It is never later than the real one, and earlier
        by as long as the message has waited that came fastest. A deadline that another machine has set is compared with this."""
        return time.time() if math.isinf(self._clock_ahead) else clock() - self._clock_ahead

    @classmethod
    async def connect(cls, url: str, name: str, deadline: float = 15.0, *, inbox: str = "_INBOX") -> "Bus":
        """Connects, and returns once JetStream has answered.

        Args:
            url: ``nats://[user:password@]host:port`` or ``tls://…``; several separated by commas. ``tls://`` trusts ``MYXO_CA_FILE``.
            name: as shown in the server's connection list. deadline: seconds to keep trying.
            inbox: prefix of the reply subjects; an account may subscribe below its own only (`Subjects.inbox`).

        Raises BusUnreachable with the last reason; at once if the server refuses the credentials or its certificate is not trusted.
        """
        end = time.monotonic() + deadline
        bus = cls(url, inbox)
        await bus._open(name, max(0.5, deadline))
        try:
            await bus.retry(bus.js.account_info, "JetStream's answer", "$JS.API.INFO", deadline=max(0.0, end - time.monotonic()))
        except (MyxoError, nats.js.errors.Error) as error:
            await bus.close()
            refused = isinstance(error, NotPermitted)
            words = str(error) if refused else f"the NATS server at {redacted(url)} has no JetStream ({error})"
            raise BusUnreachable(words, refused=refused) from error
        await bus._acks.open()
        return bus

    # --- attempts

    async def retry(
        self,
        attempt: Callable[[], Awaitable[Result]],
        awaited: str,
        *subjects: str,
        deadline: float,
        awaited_from: str = "",
        hold: bool = False,
    ) -> Result:
        """Repeats an attempt until it succeeds and returns its result.

        Args:
            awaited, awaited_from: the expected thing and its sender (default: the server), for the error. subjects: see `raise_if_refused`.
            hold: whether to wait for room, where there is none, for `BackPressure.patience_s` if that is longer than the deadline.

        Raises DeadlineExceeded, NotPermitted, StreamFull (no room in time), and any error of an attempt that is not `TRANSIENT`.
        """
        start = time.monotonic()
        with self.full.write(self.full.patience_s if hold else 0.0) as write:
            while True:
                try:
                    return await attempt()
                except (nats.js.errors.APIError, *TRANSIENT) as error:
                    if reason := full_reason(error):
                        write.refused(f"{awaited}: {reason}")
                    elif not isinstance(error, TRANSIENT):
                        raise
                    self.raise_if_refused(start, *subjects)
                    limit = max(deadline, write.patience_s) if write.reason else deadline
                    if time.monotonic() + RETRY_PAUSE > start + limit or self.connection.is_closed:
                        if write.reason:
                            raise StreamFull(f"{write.reason}; no room within {limit:g} s, given up") from error
                        awaited_from = awaited_from or redacted(self.url)
                        raise DeadlineExceeded(awaited, awaited_from, round(limit, 1), f"given up ({type(error).__name__})") from error
                await asyncio.sleep(RETRY_PAUSE_S if write.reason else RETRY_PAUSE)

    # --- publishing

    async def publish(
        self,
        subject: str,
        message: Message | bytes,
        *,
        msg_id: str | None = None,
        after: tuple[str, int] | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        deadline: float = 60.0,
        hold: bool = True,
        once: bool = False,
    ) -> int:
        """Publishes a message, or the bytes of one, into a stream and waits for the server's acknowledgement.

        Args:
            msg_id: makes a repeated publish count once, within the stream's duplicate window.
            after: (stream, its last sequence as this writer knows it); the server refuses the message if the stream has moved on.
            before: awaited before each attempt; attempts are made only while connected. deadline: seconds of retrying.
            hold: see `retry`; False for what may rather be lost than waited for. once: the server refuses it where the subject has one.

        Returns the stream sequence. Raises MessageTooLarge, WrongSequence, DeadlineExceeded, StreamFull.
        """
        outgoing, unconfirmed = self._outgoing(subject, message, msg_id, after), self._unconfirmed()
        if once:
            outgoing = outgoing[0], {**(outgoing[1] or {}), "Nats-Expected-Last-Subject-Sequence": "0"}

        async def attempt() -> int:
            if before is not None:
                await before()
                if not self.connection.is_connected:  # the client would send it later, after reconnecting
                    raise nats.errors.ConnectionReconnectingError
            [ack] = await self._acks.publish(subject, [outgoing])
            if isinstance(ack, int):
                return ack
            unconfirmed([ack])
            if not isinstance(ack, nats.js.errors.APIError) or ack.err_code not in WRONG_LAST_SEQUENCE:
                raise ack
            if after is not None and msg_id is not None and await self._is_published(after[0], after[1] + 1, msg_id):
                return after[1] + 1  # an earlier attempt went through and only its acknowledgement was lost
            raise WrongSequence(f"{subject}: {ack.description}; another writer is active") from ack

        return await self.retry(attempt, f"confirmation of {subject}", subject, deadline=deadline, hold=hold)

    async def publish_all(self, subject: str, messages: Mapping[str, Message], *, deadline: float = 60.0) -> None:
        """Publishes messages, ``msg_id`` → message, into one stream, and waits until the server has acknowledged them all.

        Messages without an acknowledgement are sent again within the deadline.

        Raises MessageTooLarge before any is sent, DeadlineExceeded, StreamFull.
        """
        left = [self._outgoing(subject, message, msg_id, None) for msg_id, message in messages.items()]
        unconfirmed = self._unconfirmed()

        async def attempt() -> None:
            nonlocal left
            acks = await self._acks.publish(subject, left)
            left = [message for message, ack in zip(left, acks, strict=True) if isinstance(ack, Exception)]
            errors = [ack for ack in acks if isinstance(ack, Exception)]
            unconfirmed(acks)
            for error in sorted(errors, key=lambda error: isinstance(error, TRANSIENT)):  # what another attempt cannot help comes first
                raise error

        if left:
            await self.retry(attempt, f"confirmation of {subject}", subject, deadline=deadline, hold=True)

    def _outgoing(self, subject: str, message: Message | bytes, msg_id: str | None, after: tuple[str, int] | None) -> Outgoing:
        headers: dict[str, str] = {} if msg_id is None else {"Nats-Msg-Id": msg_id}
        if after is not None:
            headers["Nats-Expected-Last-Sequence"] = str(after[1])
        payload = message if isinstance(message, bytes) else message.encode()
        self._check_size(subject, payload, headers)
        return payload, headers or None

    def _unconfirmed(self) -> Callable[[Sequence[Ack]], None]:
        """Returns what takes the acknowledgements of each attempt at one publish, and raises Unconfirmed where there is none again and
        again."""
        attempts = 0

        def take(acks: Sequence[Ack]) -> None:
            nonlocal attempts
            silent = bool(acks) and all(isinstance(ack, nats.errors.TimeoutError) for ack in acks) and self.connection.is_connected
            attempts = attempts + 1 if silent else 0
            if attempts >= UNCONFIRMED_ATTEMPTS:
                raise Unconfirmed

        return take

    async def _is_published(self, stream: str, sequence: int, msg_id: str) -> bool:
        """Returns whether the stream's message at ``sequence`` is the one published as ``msg_id``."""
        try:
            stored = await self.js.get_msg(stream, sequence)
        except nats.js.errors.NotFoundError:
            return False
        return (stored.headers or {}).get("Nats-Msg-Id") == msg_id

    @property
    def message_limit(self) -> int:
        """Returns the most bytes of an encoded message that the bus takes, whatever headers it has."""
        return self.connection.max_payload - 2 * SIZE_MARGIN

    def _check_size(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        size = len(payload) + sum(len(key) + len(value) + 4 for key, value in headers.items())
        limit = self.connection.max_payload - SIZE_MARGIN
        if size > limit:
            raise MessageTooLarge(f"{size} bytes for {subject} are over the bus's limit of {limit}; payloads belong in the store")

    # --- request and reply

    async def request(
        self,
        subject: str,
        message: Message,
        reply: type[Reply],
        *,
        deadline: float,
        awaited_from: str,
        patient: bool = True,
        absence: float | None = None,
    ) -> Reply:
        """Sends a request and returns its answer.

        Args:
            reply: the message class (or base class) expected back.
            deadline: seconds in all. awaited_from: the expected sender of the answer, for the error.
            patient: whether to ask again while there is no answer, and as soon as a broken connection is restored (only for idempotent
                requests).
            absence: of a patient request, for how many seconds the subject may lack a listener after it had one, or after the connection
                was restored, which others' may be a little later; None: for the whole deadline.

        Raises RequestRefused if the receiver declines, DeadlineExceeded, BadMessage.
        """
        payload = message.encode()
        start, heard = time.monotonic(), 0.0

        def no_listener() -> DeadlineExceeded:
            self.raise_if_refused(start, subject)
            return DeadlineExceeded(f"an answer on {subject}", awaited_from, round(time.monotonic() - start, 3), "there is no listener")

        async def attempt() -> bytes:
            nonlocal heard
            left = max(0.05, start + deadline - time.monotonic())
            try:
                return await self._request_once(subject, payload, min(left, ATTEMPT_SECONDS))
            except nats.errors.NoRespondersError as error:
                if absence is not None and time.monotonic() > max(heard, self.restored_s) + absence:
                    raise no_listener() from error
                raise
            except TRANSIENT:
                heard = time.monotonic()
                raise

        if patient:
            self._check_size(subject, payload, {})
            data = await self.retry(attempt, f"an answer on {subject}", subject, deadline=deadline, awaited_from=awaited_from)
        else:
            try:
                data = await self.ask(subject, payload, deadline=deadline, awaited_from=awaited_from)
            except nats.errors.NoRespondersError as error:
                raise no_listener() from error
        answer = Message.decode(data)
        if isinstance(answer, Refused):
            refused = RequestRefused(f"{awaited_from}: {answer.reason}")
            refused.error = answer.error
            raise refused
        if not isinstance(answer, reply):
            raise BadMessage(f"{awaited_from} answered {subject} with a {type(answer).__name__} where {reply.__name__} was expected")
        return answer

    async def ask(self, subject: str, payload: bytes, *, deadline: float, awaited_from: str) -> bytes:
        """Sends bytes as a request, once, and returns the bytes of the answer, for programs outside of Myxo, which use no `Message`.

        Raises NoRespondersError if the subject has no listener, DeadlineExceeded, MessageTooLarge, NotPermitted.
        """
        self._check_size(subject, payload, {})
        start = time.monotonic()
        try:
            return bytes((await self.connection.request(subject, payload, timeout=deadline)).data)
        except nats.errors.NoRespondersError:
            raise
        except TRANSIENT as error:
            self.raise_if_refused(start, subject)
            raise DeadlineExceeded(f"an answer on {subject}", awaited_from, deadline, "given up") from error

    async def serve(self, subject: str, request: type[Request], handler: Callable[[Request], Awaitable[Message]]) -> None:
        """Answers requests on ``subject`` until the connection closes; a `MyxoError` of the handler becomes a `Refused`.

        Each request is handled in its own task, so a slow one does not delay the next. What the server itself delivers here, because
        somebody named this subject for the answer to a request of JetStream's, is dropped. Raises NotPermitted.
        """
        running: set[asyncio.Task[None]] = set()

        async def on_message(message: Msg) -> None:
            # what a stream stored has such headers from a direct get, an acknowledgement as its reply from a consumer; no request has
            headers = message.headers or ()
            if message.reply.startswith("$JS.ACK.") or "Nats-Stream" in headers or "Nats-Sequence" in headers:
                self._log.error("request_forged", subject=subject, of=message.subject, next_action="dropped")
                return
            task = asyncio.create_task(self._answer(message, request, handler))
            running.add(task)
            task.add_done_callback(running.discard)
            log_failure(task, f"answering on {subject}")

        start = time.monotonic()
        await self.connection.subscribe(subject, cb=on_message)
        with contextlib.suppress(*TRANSIENT):  # a connection that has just broken subscribes again when it is restored
            for _ in range(2):  # a ping may overtake data that is not sent yet; a refusal arrives before the answer to the second
                await self.connection.flush(timeout=int(ATTEMPT_SECONDS))
        self.raise_if_refused(start, subject)

    async def _answer(self, message: Msg, request: type[Request], handler: Callable[[Request], Awaitable[Message]]) -> None:
        try:
            reply = (await handler(request.decode(message.data))).encode()
            self._check_size(f"an answer on {message.subject}", reply, {})
        except MyxoError as error:
            self._log.warning("request_refused", subject=message.subject, reason=str(error))
            reply = Refused(reason=str(error), error=type(error).__name__).encode()
        except Exception as error:
            self._log.exception("request_failed", subject=message.subject)
            reply = Refused(reason=f"internal error: {type(error).__name__}: {error}").encode()
        try:
            await message.respond(reply)
        except TRANSIENT as error:
            self._log.warning("reply_lost", subject=message.subject, error=str(error))

    # --- key-value

    async def put(self, bucket: str, key: str, value: bytes, *, deadline: float = KV_SECONDS) -> int:
        """Writes a key; returns its revision."""
        store = await self._bucket(bucket)
        return await self.retry(lambda: store.put(key, value), f"KV {bucket}/{key}", f"$KV.{bucket}.{key}", deadline=deadline)

    async def get(self, bucket: str, key: str, *, deadline: float = KV_SECONDS) -> bytes | None:
        """Reads a key; returns None if it is absent, or is no name of a key."""
        store = await self._bucket(bucket)
        read = f"$JS.API.STREAM.MSG.GET.KV_{bucket}"
        try:
            return (await self.retry(lambda: store.get(key), f"KV {bucket}/{key}", read, deadline=deadline)).value or b""
        except (nats.js.errors.KeyNotFoundError, nats.js.errors.KeyDeletedError, nats.js.errors.InvalidKeyError):
            return None

    async def delete(self, bucket: str, key: str, *, deadline: float = 5.0) -> None:
        """Removes a key; an absent key is no error."""
        store = await self._bucket(bucket)
        await self.retry(lambda: store.delete(key), f"KV {bucket}/{key}", f"$KV.{bucket}.{key}", deadline=deadline)

    async def keys(self, bucket: str) -> list[str]:
        """Returns the live keys of a bucket."""
        prefix, state = f"$KV.{bucket}.", f"$JS.API.STREAM.INFO.KV_{bucket}"
        attempt = functools.partial(self.js.stream_info, f"KV_{bucket}", subjects_filter=f"{prefix}>")
        info = await self.retry(attempt, f"keys of KV {bucket}", state, deadline=KV_SECONDS)
        return sorted(subject.removeprefix(prefix) for subject in (info.state.subjects or {}))

    async def _bucket(self, bucket: str) -> KeyValue:
        if bucket not in self._buckets:
            info = f"$JS.API.STREAM.INFO.KV_{bucket}"
            try:
                opened = await self.retry(lambda: self.js.key_value(bucket), f"KV bucket {bucket}", info, deadline=KV_SECONDS)
            except nats.js.errors.BucketNotFoundError as error:
                raise MyxoError(f"the bus has no KV bucket {bucket}: does the run exist there? (`myxo up` makes it)") from error
            self._buckets[bucket] = opened
        return self._buckets[bucket]
