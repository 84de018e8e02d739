"""Asks the store whether it holds payloads still."""

from collections.abc import Sequence

from redis.exceptions import RedisError

from shared.runtime.errors import MyxoError
from shared.service.service_base import Service

PRESENCE_SECONDS = 60.0
"""The deadline for the store's answer; a store that restarts answers sooner."""


async def has_lost(service: Service, keys: Sequence[str]) -> bool:
    """Returns whether the store holds one of ``keys`` no more. One that does not say within `PRESENCE_SECONDS` has lost nothing, as far as
    is known."""
    try:
        return bool(await service.store.missing(list(keys), deadline=PRESENCE_SECONDS))
    except (MyxoError, RedisError) as error:
        service.log.warning("payloads_not_looked_for", blobs=len(keys), error=str(error))
        return False
