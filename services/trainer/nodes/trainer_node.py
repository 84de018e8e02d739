"""A node of the trainer as a service: its agent, and nothing else."""

import asyncio
import os
import signal
import sys

from services.trainer.nodes.node_ranks import NodeRanks
from shared.bus.registry import NODE
from shared.nodes.node_agent import NodeAgent
from shared.runtime.addresses import HTTP_VARIABLE
from shared.service.service_base import attended, connect


def run_node(service: str, role: str, rank: int, module: str = "services.trainer.rank") -> None:
    """Serves as a node until the run is done or the node is asked to stop. Exits the process with the attempt's code where it failed.

    Args:
        service: the name of the role's service. role: actor or critic. rank: this node's. module: what each rank runs, with the role.
    """
    code = asyncio.run(_serve(service, role, rank, module))
    if code:
        sys.exit(code)


async def _serve(name: str, role: str, rank: int, module: str) -> int:
    rank_environment = {}
    if rank == 0 and (http := os.environ.pop(HTTP_VARIABLE, "")):  # rank 0 shows the trainer's metrics there
        rank_environment[HTTP_VARIABLE] = http
    service = await connect(NODE, role="trainer")
    service.instance = f"{name}-node-{rank}"
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stopping.set)
    try:
        async with attended(service):
            trainer = service.config.trainer
            nodes, share = trainer.nodes(role), trainer.ranks_per_node(role)
            ranks = NodeRanks(rank, nodes, share, (module, role), rank_environment)
            job = service.subjects.trainer_nodes(role)
            return await NodeAgent(service, job, rank, nodes, trainer.node_timeout, ranks).run()
    finally:
        await service.store.close()
        await service.bus.close()
