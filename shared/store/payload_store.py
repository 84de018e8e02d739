"""The payload plane: blobs in Redis or Valkey, written before their reference travels and removed only when told.

Async for services on an event loop (`Store`); the trainer's ranks read with `BlockingStore`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.runtime import server_urls
from shared.runtime.errors import DeadlineExceeded, MyxoError, PayloadMissing
from shared.store.blobs import Answer, BlobConnection, Reader

RETRY_PAUSE = 0.2
SOCKET_SECONDS = 10.0
_AWAY = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, OSError)
_REFUSED = (AuthenticationError, AuthorizationError, NoPermissionError)  # the first two are connection errors to the library


class StoreUnreachable(MyxoError):
    """No Redis or Valkey answers at the URL, or it does not let this client in."""


class StoreRefused(MyxoError):
    """The store does not take the credentials, or the account may not do this. Trying again does not help."""


def options(url: str) -> dict[str, Any]:
    """What a client of ``url`` is made with besides the URL: for ``rediss://`` whom to trust. Raises ConfigError."""
    if not url.startswith("rediss:"):
        return {}
    authorities = server_urls.authorities()
    return {"ssl_check_hostname": True} | ({"ssl_ca_certs": authorities} if authorities else {})


class Store:
    """Blobs by key. They go over a connection of their own (`shared.store.blobs`), with TLS over the library's pool like all else.

    Args:
        url: ``redis://…``, ``rediss://…`` (trusts ``MYXO_CA_FILE``) or ``unix:///path/to/socket``.

    Every call raises DeadlineExceeded where the store stays away, StoreRefused where the account may not do this.
    """

    def __init__(self, url: str) -> None:
        self._url, self._encrypted = url, url.startswith("rediss:")
        self._client: Any = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=SOCKET_SECONDS,
            retry=AsyncRetry(ConstantBackoff(0), 0),
            **options(url),
        )
        self._link: asyncio.Future[BlobConnection] | None = None

    async def ping(self, deadline: float = 15.0) -> None:
        """Proves that the store answers. Raises StoreUnreachable."""
        try:
            await self._until(deadline, lambda: self._client.ping(), "an answer")
        except StoreRefused as error:
            raise StoreUnreachable(str(error)) from error
        except (DeadlineExceeded, RedisError) as error:
            raise StoreUnreachable(f"the store does not answer: {error}") from error

    async def write(self, blobs: Mapping[str, bytes], deadline: float = 60.0) -> None:
        """Writes all blobs, or raises: an existing key is overwritten with the same content on a retry."""

        async def once() -> None:
            if self._encrypted:
                async with self._client.pipeline(transaction=False) as pipe:
                    for key, blob in blobs.items():
                        pipe.set(key, blob)
                    await pipe.execute()
            else:
                _checked(await (await self._linked()).set(blobs))

        if blobs:
            await self._until(deadline, once, f"write of {len(blobs)} blobs")

    async def read(self, keys: Sequence[str], deadline: float = 60.0) -> list[bytes]:
        """The blobs in order. Raises PayloadMissing naming the first absent key."""

        async def once() -> Sequence[bytes | None]:
            if self._encrypted:
                return [await self._client.get(key) for key in keys]
            return _checked(await (await self._linked()).get(keys))

        blobs = await self._until(deadline, once, f"read of {len(keys)} blobs ({keys[0]}, …)") if keys else []
        return [_present(key, blob) for key, blob in zip(keys, blobs, strict=True)]

    async def missing(self, keys: Sequence[str], deadline: float = 60.0) -> list[str]:
        """Those of ``keys`` that the store does not hold."""

        async def once() -> Sequence[int]:
            if await self._client.exists(*keys) == len(keys):  # nearly always: one answer, not one a key
                return [1] * len(keys)
            async with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.exists(key)
                return list(await pipe.execute())

        held = await self._until(deadline, once, f"presence of {len(keys)} blobs") if keys else []
        return [key for key, there in zip(keys, held, strict=True) if not there]

    async def free(self, keys: Sequence[str], deadline: float = 60.0) -> None:
        """Removes blobs; absent ones are fine."""
        if keys:
            await self._until(deadline, lambda: self._client.unlink(*keys), f"removal of {len(keys)} blobs")

    async def close(self) -> None:
        if self._link is not None:
            self._link.cancel()
            if self._link.done() and not self._link.cancelled() and self._link.exception() is None:
                self._link.result().close()
        await self._client.aclose()

    async def _linked(self) -> BlobConnection:
        """The connection for blobs, made where there is none (any more)."""
        link = self._link
        if link is None or (link.done() and (link.cancelled() or link.exception() is not None or link.result().closed)):
            self._link = link = asyncio.ensure_future(BlobConnection.open(self._url, SOCKET_SECONDS, {}))
        return await asyncio.shield(link)

    async def _until(self, deadline: float, once: Any, what: str) -> Any:
        end = time.monotonic() + deadline
        while True:
            try:
                return await once()
            except _REFUSED as error:
                raise _refusal(what, error) from error
            except _AWAY as error:
                _check_trust(what, error)
                if time.monotonic() + RETRY_PAUSE > end:
                    raise DeadlineExceeded(what, "the store", deadline, f"given up ({error})") from error
            except ResponseError as error:
                if not str(error).startswith("LOADING") or time.monotonic() + RETRY_PAUSE > end:
                    raise
            await asyncio.sleep(RETRY_PAUSE)


class BlockingStore:
    """The reading side for code without an event loop."""

    def __init__(self, url: str) -> None:
        self._url, self._options = url, options(url)
        self._reader: Reader | None = None

    def read(self, keys: Sequence[str], deadline: float = 60.0) -> list[bytes]:
        """The blobs in order. Raises PayloadMissing naming the first absent key, DeadlineExceeded, StoreRefused."""
        return list(self.stream(keys, deadline))

    def stream(self, keys: Sequence[str], deadline: float = 60.0) -> Iterator[bytes]:
        """The blobs in order, one by one, the next few on their way meanwhile. ``deadline``: seconds for each. Raises as `read` does."""
        done, end = 0, time.monotonic() + deadline
        while done < len(keys):
            reader, self._reader = self._reader, None  # two streams at a time never share a connection
            try:
                if reader is None:
                    reader = Reader(self._url, SOCKET_SECONDS, self._options)
                for answer in reader.get(keys[done:]):
                    if isinstance(answer, Exception):
                        raise answer
                    key, done = keys[done], done + 1
                    yield _present(key, answer)
                    end = time.monotonic() + deadline
                self.close()
                self._reader = reader
                return
            except _REFUSED as error:
                raise _refusal(f"blob {keys[done]}", error) from error
            except _AWAY as error:
                _check_trust(f"blob {keys[done]}", error)
                if time.monotonic() + RETRY_PAUSE > end:
                    raise DeadlineExceeded(f"blob {keys[done]}", "the store", deadline, f"given up ({error})") from error
            finally:
                if reader is not None and reader is not self._reader:  # answers to what was asked for are still to come on it
                    reader.close()
            time.sleep(RETRY_PAUSE)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _checked(answers: Sequence[Answer]) -> Sequence[bytes | None]:
    """The answers, where none is an error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers  # type: ignore[return-value]


def _present(key: str, blob: bytes | None) -> bytes:
    if blob is None:
        raise PayloadMissing(f"the store holds no blob {key}")
    return blob


def _refusal(what: str, error: Exception) -> StoreRefused:
    return StoreRefused(f"the store refuses {what}: {error}")


def _check_trust(what: str, error: Exception) -> None:
    """Raises StoreRefused where the connection failed at the server's certificate."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        then = f"name the authority's file in {server_urls.CA_VARIABLE}"
        raise StoreRefused(f"{what} is not asked for: the store's certificate is not trusted; {then} ({error})") from error
