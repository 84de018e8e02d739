"""A further node of an engine: a service that runs SGLang's part there, as the engine's first node tells, and nothing else."""

import asyncio

from services.rollout.engine_nodes.engine_ranks import EngineRanks
from services.rollout.engine_nodes.rank_door import RankDoor
from services.rollout.replica_command import engine_log, engine_name, replica_command
from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.leader_lease import AWAY_SECONDS
from shared.bus.registry import ENGINE_NODE
from shared.nodes.node_agent import NodeAgent
from shared.runtime.addresses import node_rank, own_address
from shared.runtime.errors import MyxoError
from shared.service.service_base import Service

SECRET_SECONDS = AWAY_SECONDS + 10.0
"""The time for which the ranks' thread waits for the first node's secret: beyond the deadline of reading it, should the loop be gone."""

PHASE_SECONDS = 5.0
"""The interval at which a follower asks whether the run has ended."""


def settle_node(service: Service) -> None:
    """Makes the service that of a node where the engine has several and this is not the first. Raises ConfigError."""
    nodes = service.config.rollout.nodes_per_engine
    if nodes > 1:
        name = engine_name(service.config)
        if rank := node_rank(nodes, of="the engine"):
            service.name, service.instance = ENGINE_NODE, f"{name}-node-{rank}"


async def follow(service: Service) -> None:
    """Serves as a further node until the run has ended or the service is asked to stop. Raises AttemptFailed, LeaseLost."""
    config, nodes = service.config, service.config.rollout.nodes_per_engine
    rank, name = node_rank(nodes, of="the engine"), engine_name(config)
    loop = asyncio.get_running_loop()
    ranks = EngineRanks(
        rank,
        nodes,
        lambda: asyncio.run_coroutine_threadsafe(agent.secret_of(0), loop).result(SECRET_SECONDS),
        lambda meeting: replica_command(service, name, meeting),
        engine_log(service),
    )
    door = RankDoor(lambda: ranks.engine)
    async with door.open(own_address()):
        agent = NodeAgent(
            service,
            service.subjects.engine_nodes(name),
            rank,
            nodes,
            config.trainer.node_timeout,
            ranks,
            leave_seconds=0.0,
            door=lambda: door.port,
            secret=door.secret,
        )
        async with service.background(_end_with_run(service)):
            await agent.run()


async def _end_with_run(service: Service) -> None:
    """Has the service stop once the run has ended: its leader may have left without a word."""
    while True:
        await asyncio.sleep(PHASE_SECONDS)
        try:
            if await runs.phase(service.bus, service.run) in runs.ENDS:
                service.stopping.set()
        except (MyxoError, *BUS_ERRORS):
            continue  # the bus is away: nothing is known
