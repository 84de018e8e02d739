"""One node's agent: it holds the node's lease, reads those of the others, and does what the node's decisions command.

Ranks run in processes below it. Everything that it waits for has a deadline, in the decisions or in the bus.

A lease says that a node reaches the bus. Two nodes that both reach it may not reach each other, and then their ranks wait inside a
collective for as long as its deadline allows. So each node asks every node of a lower rank for a sign of life, over a TCP connection of
their own (`NodeLinks`): it knows within seconds which other one does not answer, and says so in its lease. What travels are eight bytes,
and the same eight bytes back: a link that is cut in one direction alone is noticed, too, and nothing that arrives is interpreted. Where a
node is asked, its *point*, is an address and a port, written ``address:port``.
"""

import asyncio
import contextlib
import itertools
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import structlog

from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS, TRANSIENT, warn_unreadable
from shared.bus.leader_lease import AWAY_SECONDS, LeaderLease, LeaseTiming, read_lease
from shared.bus.registry import STANDBY
from shared.nodes.node_decisions import (
    HEALTHY_SECONDS,
    LINK_LOST,
    NODE_LOST,
    STOP_SECONDS,
    AnnounceAttempt,
    BeginRanks,
    FirstNode,
    FurtherNode,
    KillRanks,
    LeaveNode,
    NodeCommand,
    NodeObserver,
    NodeSituation,
    OwnRanks,
    PublishNodeEvent,
    SeenNode,
    ShowState,
    StopRanks,
)
from shared.runtime import exit_codes
from shared.runtime.addresses import HOST_VARIABLE, LOOPBACK, own_address
from shared.runtime.errors import BadMessage, ConfigError, DeadlineExceeded, MyxoError
from shared.runtime.host import clock, process_mark
from shared.runtime.tasks import cancelled, to_the_end
from shared.schema.service_messages import Attempt, NodeSecret, NodeState
from shared.service.service_base import Service

BEAT_BYTES = 8  # bytes of a question, and of its answer: the question's number

# The most connections at once for each node of the job: one is used, and those that were cut off are still open for a while.
CONNECTIONS_PER_NODE = 4


class NodeLinks:
    """One node's ends of its links. Everything runs in the event loop that calls it.

    ``nodes``: how many the job has. ``silence_s``: seconds without an answer after which a link counts as down.
    """

    def __init__(self, nodes: int, silence_s: float) -> None:
        self.silence_s = silence_s
        self._interval_s, self._answer_s = silence_s / 8, silence_s / 3
        self._most = CONNECTIONS_PER_NODE * nodes
        self._address, self._port, self._refused = "", 0, ""
        self._server: asyncio.Server | None = None
        self._asked_by: set[asyncio.Task[None]] = set()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._heard: dict[str, float] = {}

    @property
    def point(self) -> str:
        """Returns where this node is asked; empty: nowhere."""
        return f"{self._address}:{self._port}" if self._server is not None else ""

    async def listen(self, address: str) -> None:
        """Listens at an address, at any free port, in the place of where it did; nothing changes where that is the same. An address that
        this machine has not (any more) is no error: the next call tries again."""
        if self._server is not None and address == self._address:
            return
        try:
            server = await asyncio.start_server(self._answer, address, 0)
        except OSError as error:
            if address != self._refused:
                structlog.get_logger().warning("links_not_open", address=address, error=str(error), next_action="it is tried again")
            self._refused = address
            return
        await self._close_server()
        self._refused, self._server, self._address, self._port = "", server, address, server.sockets[0].getsockname()[1]

    def ask(self, points: Iterable[str]) -> None:
        """Keeps asking at these points from now on, and at no others. One that is new has `silence_s` for its first answer."""
        wanted = {point for point in points if point}
        for point in set(self._asking) - wanted:
            self._asking.pop(point).cancel()
            del self._heard[point]
        for point in wanted - set(self._asking):
            self._heard[point] = clock()
            self._asking[point] = asyncio.ensure_future(self._keep_asking(point))

    def silent(self) -> list[str]:
        """Returns the points that have not answered for `silence_s`."""
        return sorted(point for point, at in self._heard.items() if clock() - at >= self.silence_s)

    async def close(self) -> None:
        """Asks and answers no more."""
        asking = list(self._asking.values())
        self.ask(())
        await cancelled(asking)
        await self._close_server()

    async def _close_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        await cancelled(list(self._asked_by))

    # --- asking

    async def _keep_asking(self, point: str) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                address, _, port = point.rpartition(":")
                async with asyncio.timeout(self._answer_s):
                    reader, writer = await asyncio.open_connection(address, int(port))
                try:
                    for number in itertools.count(1):
                        question = number.to_bytes(BEAT_BYTES)
                        writer.write(question)
                        async with asyncio.timeout(self._answer_s):
                            if await reader.readexactly(BEAT_BYTES) != question:
                                raise ConnectionError("another answer than the one to the question")
                        self._heard[point] = clock()
                        await asyncio.sleep(self._interval_s)
                finally:
                    writer.transport.abort()  # what is still to be sent is of no use
            await asyncio.sleep(self._interval_s)

    # --- answering

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # a server's handler runs as one
        try:
            if len(self._asked_by) < self._most:
                self._asked_by.add(task)
                # cancelled by `_close_server` alone; asyncio would log it as an error of its own
                with contextlib.suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
                    while True:
                        async with asyncio.timeout(self.silence_s):
                            writer.write(await reader.readexactly(BEAT_BYTES))
                            await writer.drain()
        finally:
            self._asked_by.discard(task)
            writer.transport.abort()


POLL_SECONDS = 0.5
# The seconds after which a link without an answer is down, in durations of a lease: a node that reaches nothing is noticed before, by its
# lease, and gets the blame.
SILENCE = 1.5
ANNOUNCE_SECONDS = 10.0  # deadline of writing an attempt; where the bus is away for longer, it is written again as soon as it is back


class AttemptFailed(MyxoError):
    """An attempt over several nodes, of a trainer or of an engine, has failed on one of them, or a node that it needs did not come."""


class RanksOfNode(Protocol):
    """The ranks that an agent starts and ends. Each method blocks, for milliseconds but for `kill`, and is called in a thread."""

    own: OwnRanks

    def begin(self, number: int, address: str, port: int) -> None:
        """Starts this node's ranks for an attempt, which meet at an address; port 0: they open it, at any port."""

    def look(self) -> OwnRanks:
        """Returns how the ranks are now."""

    def ask_to_stop(self) -> None:
        """Has the ranks of all nodes leave in order."""

    def kill(self, reason: str) -> None:
        """Ends this node's ranks at once, and returns when they are gone."""


class NodeAgent:
    """One node of a job.

    ``job``: the name in KV that the job's nodes share (`shared.bus.subjects`). ``rank``, nodes: this node's, and how many there are.
    ``patience``: seconds that missing nodes are waited for. ``ranks``: what runs here. ``leave_seconds``: that ranks which are to leave
    have, before they are killed. ``stopping``: set once this node is asked to stop; default: the service's. ``command_port``: returns
    the port of the way to this node's ranks, for the first node's service; see `NodeState`. ``secret``: this node's (`NodeSecret`), for
    an engine's other nodes; empty: it has none. ``show``: shows state and reason; default: as the service's own. ``before``: awaited
    before ranks are begun here. ``healthy``: of an attempt, see `FirstNode`. ``seen``: the nodes that it watches, by rank, as they were
    seen last.
    """

    def __init__(
        self,
        service: Service,
        job: str,
        rank: int,
        nodes: int,
        patience: float,
        ranks: RanksOfNode,
        *,
        leave_seconds: float = STOP_SECONDS,
        stopping: asyncio.Event | None = None,
        command_port: Callable[[], int] = lambda: 0,
        secret: str = "",
        show: Callable[[str, str], None] | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        healthy: float = HEALTHY_SECONDS,
    ) -> None:
        self._service, self._job, self._rank, self._nodes, self._patience = service, job, rank, nodes, patience
        self._leave_seconds, self._stopping, self._command_port = leave_seconds, stopping or service.stopping, command_port
        self._secret = secret
        self._healthy, self._before = healthy, before
        self._show, self._shown = show or self._show_as_service, ("", "")
        self._timing = LeaseTiming(service.config.bus.lease_duration)
        self._links = NodeLinks(nodes, SILENCE * self._timing.duration)
        self._ranks = ranks
        key = service.subjects.node_lease(job, rank)
        self._lease = LeaderLease(service.bus, service.run, key, socket.gethostname(), self._timing, self._state)
        watched = range(1, self._nodes) if rank == 0 else range(1)
        self._observers = {other: NodeObserver(other, self._timing.duration) for other in watched}
        self.seen: dict[int, SeenNode] = {}
        self._marks: dict[int, str] = {}
        self._machine: FirstNode | FurtherNode
        self._announced: Attempt | None = None
        self._told = self._state()
        self._kill_reason = ""

    async def run(self) -> int:
        """Returns the exit code. Raises AttemptFailed, LeaseLost, DeadlineExceeded."""
        try:
            await self._links.listen(own_address())
            return await self._run()
        finally:
            await self._links.close()

    async def secret_of(self, rank: int) -> str:
        """Returns the secret of a node whose lease is held. Raises BadMessage, DeadlineExceeded."""
        subjects, key = self._service.subjects, self._service.subjects.node_lease(self._job, rank)
        value = await self._service.bus.get(subjects.secrets_bucket, key, deadline=AWAY_SECONDS)
        return NodeSecret.decode(value or b"").secret

    async def _run(self) -> int:
        if not await self._hold_the_lease():
            return exit_codes.DONE
        async with self._service.background(self._lease.keep()):
            try:
                if self._secret:
                    key, value = self._service.subjects.node_lease(self._job, self._rank), NodeSecret(secret=self._secret).encode()
                    await self._service.bus.put(self._service.subjects.secrets_bucket, key, value, deadline=AWAY_SECONDS)
                known = await self._newest_attempt()
                if self._rank == 0:
                    self._machine = FirstNode(self._nodes, self._patience, known.number if known else 0, self._healthy)
                else:
                    self._machine = FurtherNode(self._rank, self._nodes, self._patience, self._leave_seconds)
                return await self._live()
            finally:
                await to_the_end(asyncio.to_thread(self._ranks.kill, "the node's agent ended"))
                self._show("stopping", "")
                await to_the_end(self._lease.release())

    async def _hold_the_lease(self) -> bool:
        """Returns once the node's rank is this process's own; False where it was asked to stop before, or the run has ended."""
        since = time.monotonic()
        while not await self._lease.attempt():
            if time.monotonic() - since > 3 * self._timing.duration:  # not the lease of an agent that has died
                self._show(STANDBY, f"node {self._rank} of {self._nodes} is another process's")
                with contextlib.suppress(*BUS_ERRORS):
                    if await runs.phase(self._service.bus, self._service.run) in runs.ENDS:
                        return False
            if not await self._service.pause(self._timing.poll):
                return False
        return True

    async def _newest_attempt(self) -> Attempt | None:
        subjects = self._service.subjects
        value = await self._service.bus.get(subjects.leases_bucket, subjects.attempt(self._job))
        try:
            return Attempt.decode(value) if value else None
        except BadMessage as error:
            warn_unreadable(f"{subjects.leases_bucket}/{subjects.attempt(self._job)}", value, str(error), "node 0 writes it anew")
            return None

    def _show_as_service(self, state: str, detail: str) -> None:
        self._service.state, self._service.detail = state, detail

    # --- looking and acting

    async def _live(self) -> int:
        while True:
            situation = await self._look()
            for command in self._machine.step(situation):
                if isinstance(command, LeaveNode):
                    if command.code == exit_codes.BAD_INPUT:  # a supervisor shows the last line, and starts nothing again
                        print(f"{self._service.instance}: {command.reason}", file=sys.stderr, flush=True)
                    if command.code in (exit_codes.DONE, exit_codes.BAD_INPUT):
                        return command.code
                    raise AttemptFailed(command.reason)
                await self._do(command)
            if (state := self._state()) != self._told:
                self._told = state
                self._lease.renew_soon()  # it says at once what has changed
            await asyncio.sleep(min(POLL_SECONDS, self._timing.poll))

    async def _look(self) -> NodeSituation:
        ranks = await asyncio.to_thread(self._ranks.look)
        nodes: dict[int, SeenNode] | None = {}
        attempt: Attempt | None = None
        try:
            async with asyncio.timeout(self._timing.attempt):
                attempt = await self._newest_attempt()
            if self._rank == 0:
                if (own := self._announced) and (attempt is None or (attempt.number, attempt.over) != (own.number, own.over)):
                    await self._announce(own)
                attempt = self._announced
            read = await asyncio.gather(*(self._read(rank) for rank in self._observers))
            nodes = self.seen = {node.rank: node for node in read}
        except TRANSIENT:
            nodes = attempt = None
            for observer in self._observers.values():
                observer.unreadable()
        address = own_address()
        if address != LOOPBACK:  # as it seems to be while the network is down
            await self._links.listen(address)
        if attempt is not None:
            self._links.ask(attempt.points[: self._rank])
        if nodes is not None and self._rank == 0 and address == LOOPBACK:
            self._check_same_machine(nodes, address)
        return NodeSituation(clock(), self._lease.term, address, ranks, nodes, attempt, self._stopping.is_set(), self._links.point)

    def _check_same_machine(self, nodes: dict[int, SeenNode], address: str) -> None:
        """Raises ConfigError for a node on another machine, which could not reach this one at loopback."""
        boot = process_mark().split("/")[0]
        for rank, node in nodes.items():
            if node.alive and self._marks[rank].split("/")[0] != boot:
                raise ConfigError(HOST_VARIABLE, address, f"this machine's name or address, by which {node} reaches it")

    async def _read(self, rank: int) -> SeenNode:
        key = self._service.subjects.node_lease(self._job, rank)
        revision, status = await read_lease(self._service.bus, self._service.run, key, self._timing.attempt)
        if status is not None:
            self._marks[rank] = status.mark
        return self._observers[rank].see(revision, status, clock())

    async def _do(self, command: NodeCommand) -> None:
        log = self._service.log
        match command:
            case BeginRanks(number=number, address=address, port=port):
                log.info("ranks_begun", attempt=number, node=self._rank, nodes=self._nodes, address=address)
                self._kill_reason = ""
                if self._before is not None:
                    await self._before()
                await asyncio.to_thread(self._ranks.begin, number, address, port)
            case AnnounceAttempt(attempt=attempt):
                await self._announce(attempt)
            case StopRanks():
                self._ranks.ask_to_stop()
            case KillRanks():
                await asyncio.to_thread(self._ranks.kill, self._kill_reason or "another node was lost, or has failed")
            case PublishNodeEvent(what=what, detail=detail):
                log.warning(what, detail=detail) if what != "attempt_begun" else log.info(what, detail=detail)
                self._kill_reason = detail if what in (NODE_LOST, LINK_LOST) else self._kill_reason
                self._service.spawn(self._service.publish_event(what, detail))
            case ShowState(state=state, detail=detail):
                if (state, detail) != self._shown:
                    log.info("node_state", state=state, detail=detail)
                    self._shown = state, detail
                    self._show(state, detail)
                    await self._service.announce()

    async def _announce(self, attempt: Attempt) -> None:
        """Writes an attempt, as long as this agent holds the first node's lease. Raises LeaseLost; DeadlineExceeded for a last one."""
        self._announced = attempt.model_copy(update={"at": time.time()})
        await self._lease.held()
        subjects = self._service.subjects
        value, last = self._announced.encode(), attempt.over in ("done", "stopped", "failed")  # this agent leaves then
        with contextlib.suppress(*([] if last else [DeadlineExceeded])):
            deadline = AWAY_SECONDS if last else ANNOUNCE_SECONDS
            await self._service.bus.put(subjects.leases_bucket, subjects.attempt(self._job), value, deadline=deadline)

    # --- what the lease says

    def _state(self) -> NodeState:
        ranks = {name: getattr(self._ranks.own, name) for name in ("running", "ended", "code", "reason", "consequence")}
        links = {"command_port": self._command_port(), "point": self._links.point, "silent": self._links.silent()}
        return NodeState(address=own_address(), stopping=self._stopping.is_set(), **ranks, **links)
