"""The registry of live services: each renews its status in KV ``services`` by heartbeat, or the status expires after its TTL.

The server alone decides that a status has expired (``bus.registry_ttl``): the clocks of two machines may differ by more than a TTL.
"""

from collections.abc import Callable

import structlog

from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.runtime.errors import BadMessage
from shared.schema.service_messages import ServiceStatus

ENVIRONMENT = "environment"  # The ``service`` of the status of an environment outside of Myxo, which is no process of the run
LAUNCHER = "launcher"  # The ``service`` and the instance of the status of a launch, which supervises services and is none of them
NODE = "node"  # The kind of service that a trainer's agent is on each of its nodes: rank 0's process is the trainer
ENGINE_NODE = "engine-node"  # The kind of service that a further node of an engine is; the first one is the rollout service
MODEL = "model"  # The kind of service that a replica of a frozen model is: the trainer pushes to replicas of kind rollout alone
WAITING = "waiting"  # The state of a node that waits for another; its detail says which
STANDBY = "standby"  # The state of a service that waits to replace the active one (`shared.bus.leader_lease`)
CATCHING_UP = "catching up"  # The state of a replica that is getting its weights from a peer or from disk: the trainer offers it none
ASLEEP = "asleep"  # The state of a replica while a trainer computes on its GPUs: whoever waits for it may wait longer

# A gauge of a replica: the version that it could not load from disk (-1: none). The trainer then writes a whole snapshot.
BROKEN_SNAPSHOT = "broken_snapshot"
RENEW_SECONDS = 4.0  # The deadline of one renewal


class Registry:
    """The statuses of a run's services.

    Accounts may write only under the keys of their own kind of service, so the key says whose status it is. One that names another service
    is ignored: it would speak for a service that its writer is not.

    Args:
        bus: an open connection. run: the run's id. on_misplaced: called once for each key that holds a status of another service.
    """

    def __init__(self, bus: Bus, run: str, on_misplaced: Callable[[], None] = lambda: None) -> None:
        self._bus, self._bucket = bus, Subjects(run).services_bucket
        self._on_misplaced = on_misplaced
        self._misplaced: set[str] = set()

    async def renew(self, status: ServiceStatus) -> None:
        """Writes a status, which is valid for the run's ``bus.registry_ttl`` seconds."""
        await self._bus.put(self._bucket, f"{status.service}.{status.instance}", status.encode(), deadline=RENEW_SECONDS)

    async def leave(self, status: ServiceStatus) -> None:
        """Removes the status at once."""
        await self._bus.delete(self._bucket, f"{status.service}.{status.instance}", deadline=RENEW_SECONDS / 2)

    async def alive(self, service: str | None = None) -> list[ServiceStatus]:
        """Returns the statuses of all live services, or of one kind, by instance. The launcher is none of them."""
        statuses = []
        for key in await self._bus.keys(self._bucket):
            if (kind := key.split(".", 1)[0]) == service or (service is None and kind != LAUNCHER):
                try:
                    if (value := await self._bus.get(self._bucket, key)) and self._belongs(key, status := ServiceStatus.decode(value)):
                        statuses.append(status)
                except BadMessage:
                    continue  # services of another schema version are ignored
        return statuses

    async def launcher(self) -> ServiceStatus | None:
        """Returns the status of the run's launch; None where there is none that is alive."""
        value = await self._bus.get(self._bucket, f"{LAUNCHER}.{LAUNCHER}")
        try:
            return ServiceStatus.decode(value) if value else None
        except BadMessage:
            return None

    def _belongs(self, key: str, status: ServiceStatus) -> bool:
        """Returns whether a status is that of its key's service."""
        if [status.service, status.instance] == key.split(".", 1):
            self._misplaced.discard(key)
            return True
        if key not in self._misplaced:
            self._misplaced.add(key)
            structlog.get_logger().warning("status_misplaced", key=key, names=f"{status.service}.{status.instance}"[:200])
            self._on_misplaced()
        return False
