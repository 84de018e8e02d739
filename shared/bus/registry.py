"""The registry of live services: each renews its status in KV ``services`` by heartbeat, or the status expires after its TTL.

The server alone decides that a status has expired (``bus.registry_ttl``): the clocks of two machines may differ by more than a TTL.
"""

from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.runtime.errors import BadMessage
from shared.schema.messages import ServiceStatus

ENVIRONMENT = "environment"
"""The ``service`` of the status of an environment outside of Myxo, which is no process of the run."""

STANDBY = "standby"
"""The state of a service that waits to replace the active one (`shared.bus.leader_lease`)."""

CATCHING_UP = "catching up"
"""The state of a replica that is getting its weights from a peer or from disk: the trainer offers it none."""

BROKEN_SNAPSHOT = "broken_snapshot"
"""A gauge of a replica: the version that it could not load from disk (-1: none). The trainer then writes a whole snapshot."""

RENEW_SECONDS = 4.0
"""The deadline of one renewal."""


class Registry:
    """The statuses of a run's services.

    Args:
        bus: an open connection. run: the run's id.
    """

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus, self._bucket = bus, Subjects(run).services_bucket

    async def renew(self, status: ServiceStatus) -> None:
        """Writes a status, which is valid for the run's ``bus.registry_ttl`` seconds."""
        await self._bus.put(self._bucket, f"{status.service}.{status.instance}", status.encode(), deadline=RENEW_SECONDS)

    async def leave(self, status: ServiceStatus) -> None:
        """Removes the status at once."""
        await self._bus.delete(self._bucket, f"{status.service}.{status.instance}", deadline=RENEW_SECONDS / 2)

    async def alive(self, service: str | None = None) -> list[ServiceStatus]:
        """Returns the statuses of all live services, or of one kind, by instance."""
        statuses = []
        for key in await self._bus.keys(self._bucket):
            if service is None or key.split(".", 1)[0] == service:
                try:
                    if value := await self._bus.get(self._bucket, key):
                        statuses.append(ServiceStatus.decode(value))
                except BadMessage:
                    continue  # services of another schema version are ignored
        return statuses
