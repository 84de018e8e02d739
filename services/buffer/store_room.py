"""Asks the store how full it is, which decides whether new groups may be admitted, and whether it still holds payloads."""

import contextlib
from collections.abc import Sequence

from redis.exceptions import RedisError

from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.telemetry import declare_metrics
from shared.service.service_base import Service
from shared.store.payload_store import StoreRefused

declare_metrics("""
    store_bytes | bytes | that the store uses
    store_max_bytes | bytes | that it may use; 0: without a bound
""")

PAUSE_ABOVE, RESUME_BELOW = 0.85, 0.75  # The parts of the store's memory from which on nothing is admitted, and below which that ends
LOOK_SECONDS = 2.0  # The deadline for the store to say how full it is; where it does not, what it said last stands


class StoreRoom:
    """Watches the store. ``reason``: why nothing is admitted; empty while there is room, or where the store has no bound."""

    def __init__(self, service: Service) -> None:
        self._service, self._held, self._warned = service, False, False
        self.reason = ""

    async def look(self) -> bool:
        """Asks the store. Returns whether work continues that was held back, by this or by a full stream."""
        with contextlib.suppress(DeadlineExceeded, StoreRefused):  # it is away, or an older account may not ask
            self._note(*await self._service.store.memory(LOOK_SECONDS))
        self._service.holding = self.reason
        was, self._held = self._held, bool(self._service.held_back)
        return was and not self._held

    def _note(self, used: int, bound: int, evicts: bool) -> None:
        if evicts and not self._warned:
            self._warned = True
            error = "the store evicts payloads when it is full, which costs their groups: set its maxmemory-policy to noeviction"
            self._service.log.error("store_evicts", error=error)
        self._service.metrics.set("store_bytes", used)
        self._service.metrics.set("store_max_bytes", bound)
        if bound and used >= bound * (RESUME_BELOW if self.reason else PAUSE_ABOVE):
            full = f"the store is {used / bound:.0%} full ({used >> 20} of {bound >> 20} MiB, its maxmemory)"
            self.reason = f"{full}; no new group is admitted until a checkpoint frees payloads, or it gets more memory"
        else:
            self.reason = ""


PRESENCE_SECONDS = 60.0  # The deadline for the store's answer; a store that restarts answers sooner


async def has_lost(service: Service, keys: Sequence[str]) -> bool:
    """Returns whether the store holds one of ``keys`` no more. One that does not say within `PRESENCE_SECONDS` has lost nothing, as far as
    is known."""
    try:
        return bool(await service.store.missing(list(keys), deadline=PRESENCE_SECONDS))
    except (MyxoError, RedisError) as error:
        service.log.warning("payloads_not_looked_for", blobs=len(keys), error=str(error))
        return False
