"""The first node of an engine over several: the replica's service holds its lease, begins attempts, and reaches the other nodes' ranks."""

import asyncio
import secrets
from pathlib import Path

from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine_nodes.engine_ranks import EngineRanks
from services.rollout.engine_nodes.rank_door import RankTunnels
from services.rollout.replica_command import engine_log, engine_name, replica_command
from shared.nodes.first_node import HEALTHY_SECONDS
from shared.nodes.node_agent import NodeAgent
from shared.service.service_base import Service

POLL_INTERVAL_S = 0.1


class EngineLeader:
    """Leads one engine's nodes.

    Attributes:
        tunnels: to the ranks on the other nodes.
    """

    def __init__(self, service: Service) -> None:
        rollout, patience = service.config.rollout, service.config.trainer.node_timeout
        nodes, name = rollout.nodes_per_engine, engine_name(service.config)
        self._service = service
        secret = secrets.token_hex(16)
        self._ranks = EngineRanks(0, nodes, lambda: secret, lambda meeting: replica_command(service, name, meeting), engine_log(service))
        # the service's own stopping must not end the engine before what it generates has been handed on
        self._agent = NodeAgent(
            service,
            service.subjects.engine_nodes(name),
            0,
            nodes,
            patience,
            self._ranks,
            stopping=asyncio.Event(),
            secret=secret,  # for the followers: nobody comes in here
            show=self._show,
            healthy=rollout.engine_start_timeout + HEALTHY_SECONDS,  # it has served for so long, then
        )
        self.tunnels = RankTunnels(lambda: self._agent.seen, self._agent.secret_of, rollout.rollout_num_gpus_per_engine // nodes)

    @property
    def ended(self) -> str:
        """Returns why this node's part of the last attempt has ended."""
        return self._ranks.own.reason

    async def keep(self) -> None:
        """Begins attempt after attempt until cancelled. Raises AttemptFailed, LeaseLost, DeadlineExceeded."""
        await self._agent.run()

    async def begun(self, last: EngineProcess | None) -> EngineProcess:
        """Returns this node's part of the engine once an attempt other than ``last``'s has begun. `keep` has the deadline."""
        while (engine := self._ranks.engine) is None or engine is last:
            await asyncio.sleep(POLL_INTERVAL_S)
        return engine

    async def reach(self, engine: Path) -> None:
        """Opens the ways to the other nodes' ranks."""
        await self.tunnels.open(engine)

    def _show(self, state: str, detail: str) -> None:
        self._service.detail = "" if state in ("ready", "stopping") else f"{state} {detail}"
