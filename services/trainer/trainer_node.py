"""A node of a trainer over several: its agent (`shared.nodes`) as a service, and the ranks that the agent starts for each attempt."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from services.trainer.torchrun import FAILURE_FILE, PORT_FILE
from shared.bus.registry import NODE
from shared.nodes.node_agent import NodeAgent
from shared.nodes.node_decisions import OwnRanks
from shared.process.child_process import ChildProcess, cause
from shared.runtime import exit_codes
from shared.runtime.addresses import HTTP_VARIABLE, listening_interfaces
from shared.service.service_base import attended, connect


class NodeRanks:
    """Starts and ends the ranks of a node; `own` says how they are. Its methods block for milliseconds, `kill` for as long as it takes.

    Args:
        node, nodes: this one's index, and how many there are. ranks: on this node. module: what each rank runs, and its arguments.
        environment: for the ranks, on top of this process's own.
    """

    def __init__(self, node: int, nodes: int, ranks: int, module: tuple[str, ...], environment: dict[str, str]) -> None:
        self._node, self._nodes, self._ranks, self._module, self._environment = node, nodes, ranks, module, environment
        self._child: ChildProcess | None = None
        self._directory = Path()
        self._asked = False
        self.own = OwnRanks()

    def begin(self, number: int, address: str, port: int) -> None:
        """Starts the ranks of an attempt, which meet at an address; port 0: they open it, at any port."""
        self._directory = Path(tempfile.mkdtemp(prefix="myxo-node-"))
        share = [str(self._directory), str(self._node), str(self._nodes), str(self._ranks), address, str(port)]
        command = [sys.executable, "-m", "services.trainer.torchrun", *share, *self._module]
        environment = {**os.environ, **listening_interfaces(across_machines=True), **self._environment}
        name, scratch = f"ranks of node {self._node}", self._directory
        self._child = ChildProcess(name, command, None, environment, watchdog=True, scratch=scratch, inherit=True)
        self._asked = False
        self.own = OwnRanks(number, ended=self.own.ended)

    def look(self) -> OwnRanks:
        """Returns how the ranks are now."""
        if self._child is not None and (code := self._child.exit_code()) is not None:
            if self._asked and code in (-signal.SIGTERM, exit_codes.STOPPED):  # the former where torchrun had no ranks yet
                code = 0
            content = self._read(FAILURE_FILE)
            failure = json.loads(content) if content else {}
            reason = "" if code == 0 else f"its ranks ended with {cause(code)}"
            if failure:
                reason = f"rank {failure['rank']}: {failure['reason']}"
            self._end(failure.get("code", code), reason, failure.get("consequence", False))
        elif self._child is not None and not self.own.port and (port := self._read(PORT_FILE)):
            self.own = OwnRanks(self.own.running, int(port), self.own.ended)
        return self.own

    def ask_to_stop(self) -> None:
        """Passes SIGTERM on: rank 0 has all ranks leave in order."""
        if self._child is not None:
            self._asked = True
            self._child.terminate()

    def kill(self, reason: str) -> None:
        """Ends the ranks at once, and returns when they are gone."""
        if self._child is not None and self.look().running:
            self._end(1, reason, True)

    def _end(self, code: int, reason: str, consequence: bool) -> None:
        assert self._child is not None
        self._child.stop(0)
        self._child = None
        self.own = OwnRanks(0, ended=self.own.running, code=code, reason=reason, consequence=consequence)

    def _read(self, name: str) -> str:
        try:
            return (self._directory / name).read_text()
        except FileNotFoundError:
            return ""


def run_node(service: str, role: str, rank: int, module: str = "services.trainer.rank") -> None:
    """Serves as a node until the run is done or the node is asked to stop, and exits the process with the code of that.

    Args:
        service: the name of the role's service. role: actor or critic. rank: this node's. module: what each rank runs, with the role.
    """
    sys.exit(asyncio.run(_serve(service, role, rank, module)))


async def _serve(name: str, role: str, rank: int, module: str) -> int:
    rank_environment = {}
    if rank == 0 and (http := os.environ.pop(HTTP_VARIABLE, "")):  # rank 0 shows the trainer's metrics there
        rank_environment[HTTP_VARIABLE] = http
    service = await connect(NODE, role="trainer")
    service.instance = f"{name}-node-{rank}"
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stopping.set)
    async with contextlib.aclosing(service), attended(service):
        trainer = service.config.trainer
        nodes, share = trainer.nodes(role), trainer.ranks_per_node(role)
        ranks = NodeRanks(rank, nodes, share, (module, role), rank_environment)
        job = service.subjects.trainer_nodes(role)
        code = await NodeAgent(service, job, rank, nodes, trainer.node_timeout, ranks).run()
        return exit_codes.STOPPED if service.stopping.is_set() and code == exit_codes.DONE else code
