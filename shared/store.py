"""The payload plane: blobs in Redis or Valkey, written before their reference travels and removed only when told.

Async for services on an event loop (`Store`); the trainer's ranks read with `BlockingStore`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
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

from shared import addresses
from shared.errors import DeadlineExceeded, MyxoError, PayloadMissing

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
    authorities = addresses.authorities()
    return {"ssl_check_hostname": True} | ({"ssl_ca_certs": authorities} if authorities else {})


class Store:
    """Blobs by key, over one connection pool.

    Args:
        url: ``redis://…``, ``rediss://…`` (trusts ``MYXO_CA_FILE``) or ``unix:///path/to/socket``.

    Every call raises DeadlineExceeded where the store stays away, StoreRefused where the account may not do this.
    """

    def __init__(self, url: str) -> None:
        self._client: Any = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=SOCKET_SECONDS,
            retry=AsyncRetry(ConstantBackoff(0), 0),
            **options(url),
        )

    async def ping(self, deadline: float = 15.0) -> None:
        """Proves that the store answers. Raises StoreUnreachable."""
        try:
            await self._until(deadline, lambda: self._client.ping(), "an answer")
        except StoreRefused as error:
            raise StoreUnreachable(str(error)) from error
        except (DeadlineExceeded, RedisError) as error:
            raise StoreUnreachable(f"the store does not answer: {error}") from error

    async def write(self, blobs: dict[str, bytes], deadline: float = 60.0) -> None:
        """Writes all blobs, or raises: an existing key is overwritten with the same content on a retry."""

        async def once() -> None:
            async with self._client.pipeline(transaction=False) as pipe:
                for key, blob in blobs.items():
                    pipe.set(key, blob)
                await pipe.execute()

        await self._until(deadline, once, f"write of {len(blobs)} blobs")

    async def read(self, keys: Sequence[str], deadline: float = 60.0) -> list[bytes]:
        """The blobs in order. Raises PayloadMissing naming the first absent key."""
        return [_present(key, await self._until(deadline, lambda key=key: self._client.get(key), f"blob {key}")) for key in keys]

    async def missing(self, keys: Sequence[str], deadline: float = 60.0) -> list[str]:
        """Those of ``keys`` that the store does not hold."""

        async def once() -> list[int]:
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
        await self._client.aclose()

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
        self._client: Any = redis.Redis.from_url(
            url, socket_timeout=SOCKET_SECONDS, socket_connect_timeout=SOCKET_SECONDS, **options(url)
        )

    def read(self, keys: Sequence[str], deadline: float = 60.0) -> list[bytes]:
        """The blobs in order. Raises PayloadMissing naming the first absent key, DeadlineExceeded, StoreRefused."""
        end = time.monotonic() + deadline
        blobs = []
        for key in keys:
            while True:
                try:
                    blobs.append(_present(key, self._client.get(key)))
                    break
                except _REFUSED as error:
                    raise _refusal(f"blob {key}", error) from error
                except _AWAY as error:
                    _check_trust(f"blob {key}", error)
                    if time.monotonic() + RETRY_PAUSE > end:
                        raise DeadlineExceeded(f"blob {key}", "the store", deadline, f"given up ({error})") from error
                except ResponseError as error:
                    if not str(error).startswith("LOADING") or time.monotonic() + RETRY_PAUSE > end:
                        raise
                time.sleep(RETRY_PAUSE)
        return blobs

    def close(self) -> None:
        self._client.close()


def _present(key: str, blob: bytes | None) -> bytes:
    if blob is None:
        raise PayloadMissing(f"the store holds no blob {key}")
    return blob


def _refusal(what: str, error: Exception) -> StoreRefused:
    return StoreRefused(f"the store refuses {what}: {error}")


def _check_trust(what: str, error: Exception) -> None:
    """Raises StoreRefused where the connection failed at the server's certificate."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        then = f"name the authority's file in {addresses.CA_VARIABLE}"
        raise StoreRefused(f"{what} is not asked for: the store's certificate is not trusted; {then} ({error})") from error
