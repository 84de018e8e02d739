"""The payload plane: blobs in Redis or Valkey, written before their reference travels and removed only on request.

Services on an event loop use `Store`; the trainer's ranks read with `BlockingStore`.
"""

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.runtime import addresses
from shared.runtime.back_pressure import RETRY_PAUSE_S, BackPressure
from shared.runtime.errors import DeadlineExceeded, MyxoError, PayloadMissing, ServerUnreachable
from shared.schema.digests import blob_limits, check_payload
from shared.schema.messages import Payload
from shared.store.blobs import SOCKET_SECONDS, Answer, BlobConnection, Reader, options

RETRY_PAUSE = 0.2
SECONDS = 60.0  # The deadline of most requests
HOLDING_SECONDS = 3600.0  # Of who holds groups: it waits for a store that is away, since a task that goes back too often is given up
DEMOTED = (ReadOnlyError, MasterDownError)
AWAY = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, OSError, *DEMOTED)
_REFUSED = (AuthenticationError, AuthorizationError, NoPermissionError)  # the first two are connection errors to the library


# What the library puts before the server's words
_IN_PIPELINE = re.compile(r"^Command # \d+ .* of pipeline caused error: ", re.DOTALL)


class StoreUnreachable(ServerUnreachable):
    """No Redis or Valkey answers at the URL, or it does not let this client in."""


class StoreRefused(MyxoError):
    """The store does not take the credentials, or the account may not do this. Trying again does not help."""


class StoreFull(MyxoError):
    """The store takes no more blobs: it has reached its ``maxmemory``, or the disk of its log is full."""


def full_reason(error: Exception) -> str:
    """Returns why there is no room, where the store refuses a write for that; else nothing."""
    text = _IN_PIPELINE.sub("", str(error))
    if isinstance(error, OutOfMemoryError) or text.startswith("OOM "):
        return f"the store is full, at its maxmemory ({text})"
    if text.startswith("NOREPLICAS "):
        return f"the store takes no writes while its replicas are away ({text})"
    return f"the store cannot write to its disk ({text})" if text.startswith("MISCONF ") else ""


class Store:
    """Holds a run's blobs by key.

    They go over a connection of their own (`shared.store.blobs`), with TLS over the library's pool like all else.

    Args:
        url: ``redis://…``, ``rediss://…`` (trusts ``MYXO_CA_FILE``) or ``unix:///path/to/socket``. run: whose payloads are read.
        seconds: the deadline of reading and writing blobs, where none is given.

    Every call raises DeadlineExceeded where the store stays away, StoreRefused where the account may not do this, StoreFull where it had no
    room for longer than `BackPressure.patience_s`. ``full``: the writes that wait for room.
    """

    def __init__(self, url: str, run: str = "", seconds: float = SECONDS) -> None:
        self._url, self._run, self._encrypted, self._seconds = url, run, url.startswith("rediss:"), seconds
        self._client: Any = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=SOCKET_SECONDS,
            retry=AsyncRetry(ConstantBackoff(0), 0),
            **options(url),
        )
        self._blobs: asyncio.Future[BlobConnection] | None = None
        self.full = BackPressure()

    async def ping(self, deadline: float = 15.0) -> None:
        """Proves that the store answers. Raises StoreUnreachable."""
        try:
            await self._retry(deadline, lambda: self._client.ping(), "an answer")
        except StoreRefused as error:
            raise StoreUnreachable(str(error), refused=True) from error
        except (DeadlineExceeded, RedisError) as error:
            raise StoreUnreachable(f"the store does not answer: {error}") from error

    async def write(self, blobs: Mapping[str, bytes], deadline: float | None = None) -> None:
        """Writes all blobs, or raises. A key that is there stays as it is: after a retry with the same content, otherwise for its readers
        to find out by the digest."""

        async def attempt() -> None:
            _checked(await (await self._blob_connection()).set(blobs))

        what = f"write of {len(blobs)} blobs"
        if self._encrypted:
            await self.commands(what, [("SETNX", key, blob) for key, blob in blobs.items()], deadline or self._seconds)
        elif blobs:
            await self._retry(deadline or self._seconds, attempt, what)

    async def read(self, payload: Payload, deadline: float | None = None) -> list[bytes]:
        """Returns the blobs of a payload in order, read no further than it says.

        Raises PayloadMissing naming the first absent key, PayloadChanged where they are not those that were announced, BadMessage for a
        reference that contradicts itself.
        """
        wanted = list(zip(payload.keys, blob_limits(payload), strict=True))

        async def attempt() -> Sequence[Any]:
            if self._encrypted:
                return [await self._client.getrange(key, 0, most) for key, most in wanted]
            return _checked(await (await self._blob_connection()).get(wanted))

        found = await self._retry(deadline or self._seconds, attempt, f"read of {len(wanted)} blobs ({payload.keys[0]}, …)")
        blobs = [_present(key, blob) for key, blob in zip(payload.keys, found, strict=True)]
        check_payload(self._run, payload, blobs)
        return blobs

    async def missing(self, keys: Sequence[str], deadline: float = 60.0) -> list[str]:
        """Returns those of ``keys`` that the store does not hold."""
        what = f"presence of {len(keys)} blobs"
        if not keys or await self._retry(deadline, lambda: self._client.exists(*keys), what) == len(keys):
            return []  # nearly always: one answer for all keys
        held = await self.commands(what, [("EXISTS", key) for key in keys], deadline)
        return [key for key, there in zip(keys, held, strict=True) if not there]

    async def free(self, keys: Sequence[str], deadline: float = 60.0) -> None:
        """Removes blobs; absent ones are no error."""
        if keys:
            await self._retry(deadline, lambda: self._client.unlink(*keys), f"removal of {len(keys)} blobs")

    async def keys(self, pattern: str) -> AsyncIterator[str]:
        """Yields the keys that match, some perhaps twice. Raises RedisError."""
        async for key in self._client.scan_iter(match=pattern, count=1000):
            yield key.decode(errors="replace")

    async def commands(self, what: str, commands: Sequence[tuple[Any, ...]], deadline: float = 60.0) -> list[Any]:
        """Runs commands that may be run twice, in one round trip, and returns their answers. ``what``: for errors."""

        async def attempt() -> list[Any]:
            async with self._client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return list(await pipe.execute())

        return list(await self._retry(deadline, attempt, what))

    async def memory(self, deadline: float) -> tuple[int, int, bool]:
        """Returns the bytes of memory that the store uses, those that it may use (0: no bound), and whether it evicts blobs beyond them."""
        reported = await self._retry(deadline, lambda: self._client.info("memory"), "its memory")
        bound = int(reported["maxmemory"])
        return int(reported["used_memory"]), bound, bound > 0 and reported.get("maxmemory_policy", "noeviction") != "noeviction"

    async def close(self) -> None:
        if self._blobs is not None:
            self._blobs.cancel()
            if self._blobs.done() and not self._blobs.cancelled() and self._blobs.exception() is None:
                self._blobs.result().close()
        await self._client.aclose()

    aclose = close  # for contextlib.aclosing

    async def _blob_connection(self) -> BlobConnection:
        """Returns the connection for blobs, and makes one where there is none (any more)."""
        opened = self._blobs
        if opened is None or (opened.done() and (opened.cancelled() or opened.exception() is not None or opened.result().closed)):
            self._blobs = opened = asyncio.ensure_future(BlobConnection.open(self._url))
        return await asyncio.shield(opened)

    async def _retry(self, deadline: float, attempt: Any, what: str) -> Any:
        start = time.monotonic()
        with self.full.write(self.full.patience_s) as write:
            while True:
                try:
                    return await attempt()
                except (*_REFUSED, *AWAY) as error:
                    _check_another_attempt(what, error, start + deadline, deadline)
                    if isinstance(error, DEMOTED):
                        await self._client.connection_pool.disconnect()
                except ResponseError as error:
                    if not (reason := full_reason(error)):
                        raise
                    write.refused(f"{what}: {reason}")
                    if write.seconds > (limit := max(min(deadline, SECONDS), write.patience_s)):  # an outage before counts not
                        raise StoreFull(f"{write.reason}; no room within {limit:g} s, given up") from error
                await asyncio.sleep(RETRY_PAUSE_S if write.reason else RETRY_PAUSE)


class BlockingStore:
    """Reads a run's payloads in code without an event loop."""

    def __init__(self, url: str, run: str = "") -> None:
        self._url, self._run = url, run
        self._reader: Reader | None = None

    def read(self, payload: Payload, deadline: float = 60.0) -> list[bytes]:
        """Returns the blobs of a payload in order. Raises as `stream` does."""
        [blobs] = self.stream([payload], deadline)
        return blobs

    def stream(self, payloads: Sequence[Payload], deadline: float = 60.0) -> Iterator[list[bytes]]:
        """Yields the blobs of each payload in order, the next few on their way meanwhile.

        Args:
            deadline: seconds for each blob.

        Raises PayloadMissing naming the first absent key, PayloadChanged, BadMessage, DeadlineExceeded, StoreRefused, as `Store.read` does.
        """
        wanted = [item for payload in payloads for item in zip(payload.keys, blob_limits(payload), strict=True)]
        with contextlib.closing(self._blobs(wanted, deadline)) as blobs:
            for payload in payloads:
                found = list(itertools.islice(blobs, len(payload.keys)))
                check_payload(self._run, payload, found)
                yield found
            next(blobs, None)  # the connection is kept once all of it is read

    def _blobs(self, wanted: Sequence[tuple[str, int]], deadline: float) -> Generator[bytes]:
        done, end = 0, time.monotonic() + deadline
        while done < len(wanted):
            reader, self._reader = self._reader, None  # two streams at a time never share a connection
            try:
                if reader is None:
                    reader = Reader(self._url)
                for answer in reader.get(wanted[done:]):
                    if isinstance(answer, Exception):
                        raise answer
                    key, done = wanted[done][0], done + 1
                    yield _present(key, answer)
                    end = time.monotonic() + deadline
                self.close()
                self._reader = reader
                return
            except (*_REFUSED, *AWAY) as error:
                _check_another_attempt(f"blob {wanted[done][0]}", error, end, deadline)
            finally:
                if reader is not None and reader is not self._reader:  # answers to what was asked for are still to come on it
                    reader.close()
            time.sleep(RETRY_PAUSE)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _checked(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Returns the answers, or raises the first that is an error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _present(key: str, blob: Any) -> bytes:
    if not blob:  # GETRANGE of an absent key; no payload has an empty blob
        raise PayloadMissing(f"the store holds no blob {key}")
    return bytes(blob)


def _check_another_attempt(what: str, error: Exception, end: float, deadline: float) -> None:
    """Raises StoreRefused where another attempt would not help, DeadlineExceeded where it would begin after ``end`` (monotonic)."""
    if isinstance(error, _REFUSED):
        raise StoreRefused(f"the store refuses {what}: {error}") from error
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        next_action = f"name the authority's file in {addresses.CA_VARIABLE}"
        raise StoreRefused(f"{what} is not asked for: the store's certificate is not trusted; {next_action} ({error})") from error
    if time.monotonic() + RETRY_PAUSE > end:
        raise DeadlineExceeded(what, "the store", deadline, f"given up ({error})") from error
