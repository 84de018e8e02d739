"""One node's agent: it holds the node's lease, reads those of the others, and does what the node's state machine commands.

It has no torch: ranks run in processes below it. Everything that it waits for has a deadline, in the machine or in the bus.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time

from services.trainer.nodes.attempt_commands import (
    AnnounceAttempt,
    BeginRanks,
    KillRanks,
    LeaveNode,
    NodeCommand,
    NodeSituation,
    ShowState,
    StopRanks,
    TellNodes,
)
from services.trainer.nodes.first_node import FirstNode
from services.trainer.nodes.further_node import FurtherNode
from services.trainer.nodes.node_presence import NodeObserver, SeenNode
from services.trainer.nodes.node_ranks import NodeRanks
from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS, TRANSIENT
from shared.bus.leader_lease import LeaderLease, LeaseTiming, clock, read_lease
from shared.bus.registry import STANDBY
from shared.runtime import exit_codes, liveness
from shared.runtime.cancellation import to_the_end
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.http_address import HTTP_VARIABLE
from shared.runtime.own_address import HOST_VARIABLE, LOOPBACK, own_address
from shared.runtime.service_base import Service, attended, connect
from shared.schema.node_messages import Attempt, NodeState

NODE = "node"
"""The kind of service that an agent is in the registry: rank 0's process is the trainer."""

POLL_SECONDS = 0.5
ANNOUNCE_SECONDS = 10.0
"""The deadline of writing an attempt; where the bus is away for longer, it is written again in the next moment."""


class AttemptFailed(MyxoError):
    """An attempt of a trainer over several nodes has failed on one of them, or a node that it needs did not come."""


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
            return await NodeAgent(service, role, rank, module, rank_environment).run()
    finally:
        await service.store.close()
        await service.bus.close()


class NodeAgent:
    """One node of a role.

    Args:
        module: what each rank runs. rank_environment: for the ranks, on top of this process's.
    """

    def __init__(self, service: Service, role: str, rank: int, module: str, rank_environment: dict[str, str]) -> None:
        self._service, self._role, self._rank = service, role, rank
        trainer = service.config.trainer
        self._nodes, self._patience = trainer.nodes(role), trainer.node_timeout
        self._timing = LeaseTiming(service.config.bus.lease_duration)
        self._ranks = NodeRanks(rank, self._nodes, trainer.ranks_per_node(role), (module, role), rank_environment)
        self._lease = LeaderLease(
            service.bus, service.run, service.subjects.node_lease(role, rank), socket.gethostname(), self._timing, self._state
        )
        watched = range(1, self._nodes) if rank == 0 else range(1)
        self._observers = {other: NodeObserver(other, self._timing.duration) for other in watched}
        self._marks: dict[int, str] = {}
        self._machine: FirstNode | FurtherNode
        self._announced: Attempt | None = None
        self._told = self._state()
        self._kill_reason = ""

    async def run(self) -> int:
        """Returns the exit code. Raises AttemptFailed, LeaseLost, DeadlineExceeded."""
        if not await self._hold_the_lease():
            return exit_codes.DONE
        async with self._service.background(self._lease.keep()):
            try:
                known = await self._newest_attempt()
                if self._rank == 0:
                    self._machine = FirstNode(self._nodes, self._patience, known.number if known else 0)
                else:
                    self._machine = FurtherNode(self._rank, self._nodes, self._patience)
                return await self._live()
            finally:
                await to_the_end(asyncio.to_thread(self._ranks.kill, "the node's agent ended"))
                self._service.state = "stopping"
                await to_the_end(self._lease.release())

    async def _hold_the_lease(self) -> bool:
        """Returns once the node's rank is this process's own; False where it was asked to stop before, or the run has ended."""
        since = time.monotonic()
        while not await self._lease.attempt():
            if time.monotonic() - since > 3 * self._timing.duration:  # not the lease of an agent that has died
                self._service.state, self._service.detail = STANDBY, f"node {self._rank} of {self._nodes} is another process's"
                with contextlib.suppress(*BUS_ERRORS):
                    if await runs.phase(self._service.bus, self._service.run) in runs.ENDS:
                        return False
            if not await self._service.pause(self._timing.poll):
                return False
        return True

    async def _newest_attempt(self) -> Attempt | None:
        subjects = self._service.subjects
        value = await self._service.bus.get(subjects.leases_bucket, subjects.attempt(self._role))
        return Attempt.decode(value) if value else None

    # --- looking and acting

    async def _live(self) -> int:
        while True:
            situation = await self._look()
            for command in self._machine.step(situation):
                if isinstance(command, LeaveNode):
                    return self._leave(command)
                await self._do(command)
            self._say()
            await asyncio.sleep(min(POLL_SECONDS, self._timing.poll))

    async def _look(self) -> NodeSituation:
        ranks = await asyncio.to_thread(self._ranks.look)
        nodes: dict[int, SeenNode] | None = {}
        attempt: Attempt | None = None
        try:
            attempt = await self._newest_attempt_now()
            read = await asyncio.gather(*(self._read(rank) for rank in self._observers))
            nodes = {node.rank: node for node in read}
        except TRANSIENT:
            nodes = attempt = None
            for observer in self._observers.values():
                observer.unreadable()
        address = own_address()
        if nodes is not None and self._rank == 0:
            self._check_address(address, nodes)
        return NodeSituation(clock(), self._lease.term, address, ranks, nodes, attempt, self._service.stopping.is_set())

    async def _newest_attempt_now(self) -> Attempt | None:
        if self._rank == 0:
            return self._announced
        async with asyncio.timeout(self._timing.attempt):
            return await self._newest_attempt()

    async def _read(self, rank: int) -> SeenNode:
        key = self._service.subjects.node_lease(self._role, rank)
        revision, status = await read_lease(self._service.bus, self._service.run, key, self._timing.attempt)
        self._marks[rank] = status.mark
        return self._observers[rank].see(revision, status, clock())

    def _check_address(self, address: str, nodes: dict[int, SeenNode]) -> None:
        """Raises ConfigError where another machine could not reach this one."""
        boot = liveness.mark().split("/")[0]
        for rank, node in nodes.items():
            if address == LOOPBACK and node.alive and self._marks[rank].split("/")[0] != boot:
                raise ConfigError(HOST_VARIABLE, address, f"this machine's name or address, by which {node} reaches it")

    async def _do(self, command: NodeCommand) -> None:
        log = self._service.log
        match command:
            case BeginRanks(number=number, address=address, port=port):
                log.info("ranks_begun", attempt=number, node=self._rank, nodes=self._nodes, address=address)
                self._kill_reason = ""
                await asyncio.to_thread(self._ranks.begin, number, address, port)
            case AnnounceAttempt(attempt=attempt):
                await self._announce(attempt)
            case StopRanks():
                self._ranks.ask_to_stop()
            case KillRanks():
                await asyncio.to_thread(self._ranks.kill, self._kill_reason or "another node was lost, or has failed")
            case TellNodes(what=what, detail=detail):
                log.warning(what, detail=detail) if what != "attempt_begun" else log.info(what, detail=detail)
                self._kill_reason = detail if what == "node_lost" else self._kill_reason
                self._service.spawn(self._service.tell(what, detail))
            case ShowState(state=state, detail=detail):
                if (state, detail) != (self._service.state, self._service.detail):
                    log.info("node_state", state=state, detail=detail)
                    self._service.state, self._service.detail = state, detail
                    await self._service.announce()
            case LeaveNode():
                raise AssertionError("left before")

    async def _announce(self, attempt: Attempt) -> None:
        """Writes an attempt, as long as this agent holds the first node's lease. Raises LeaseLost, DeadlineExceeded."""
        self._announced = attempt.model_copy(update={"at": time.time()})
        await self._lease.held()
        subjects = self._service.subjects
        value = self._announced.encode()
        await self._service.bus.put(subjects.leases_bucket, subjects.attempt(self._role), value, deadline=ANNOUNCE_SECONDS)

    def _leave(self, command: LeaveNode) -> int:
        if command.code == exit_codes.DONE:
            return command.code
        if command.code == exit_codes.BAD_INPUT:  # a supervisor shows the last line, and starts nothing again
            print(f"{self._service.instance}: {command.reason}", file=sys.stderr, flush=True)
            return command.code
        raise AttemptFailed(command.reason)

    # --- what the lease says

    def _state(self) -> NodeState:
        own = self._ranks.own
        return NodeState(
            address=own_address(),
            running=own.running,
            ended=own.ended,
            code=own.code,
            reason=own.reason,
            consequence=own.consequence,
            stopping=self._service.stopping.is_set(),
        )

    def _say(self) -> None:
        """Has the lease say at once what has changed."""
        if (state := self._state()) != self._told:
            self._told = state
            self._lease.renew_soon()
