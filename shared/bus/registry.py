"""Who is alive: every service keeps a card in KV ``services`` by heartbeat; a card that is not renewed is gone after its TTL."""

from __future__ import annotations

import time

from shared.bus.connection import Bus
from shared.bus.streams import SERVICES_TTL
from shared.bus.subjects import Subjects
from shared.runtime.errors import BadMessage
from shared.schema.messages import ServiceStatus

HEARTBEAT = SERVICES_TTL / 5
"""Seconds between renewals of a card."""

ENVIRONMENT = "environment"
"""The service of cards that speak of an environment outside of Myxo: it is no process of the run, whatever it is called."""

STANDBY = "standby"
"""State of a service that waits for another one's end to take its place (`shared.bus.leader_lease`)."""

CATCHING_UP = "catching up"
"""State of a replica that takes its weights from elsewhere just now: the trainer offers it none."""

BROKEN_SNAPSHOT = "broken_snapshot"
"""Gauge of a replica: the version that it could not have from disk, -1: none. The trainer writes a whole snapshot when it sees one."""


class Registry:
    """The run's service cards.

    Args:
        bus: an open connection. run: the run's id.
    """

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus, self._bucket = bus, Subjects(run).services_bucket

    async def renew(self, card: ServiceStatus) -> None:
        """Puts a card for the next `SERVICES_TTL` seconds."""
        await self._bus.put(self._bucket, f"{card.service}.{card.instance}", card.encode(), deadline=HEARTBEAT * 2)

    async def leave(self, card: ServiceStatus) -> None:
        """Takes the card away at once."""
        await self._bus.delete(self._bucket, f"{card.service}.{card.instance}", deadline=HEARTBEAT)

    async def alive(self, service: str | None = None) -> list[ServiceStatus]:
        """The cards of all live services, or of one kind, by instance."""
        cards = []
        for key in await self._bus.keys(self._bucket):
            if service is not None and key.split(".", 1)[0] != service:
                continue
            value = await self._bus.get(self._bucket, key)
            if not value:
                continue
            try:
                card = ServiceStatus.decode(value)
            except BadMessage:
                continue  # a service of another schema version: not one to work with
            if time.time() - card.at < SERVICES_TTL * 1.5:
                cards.append(card)
        return cards
