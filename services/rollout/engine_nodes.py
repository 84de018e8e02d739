"""An engine over several nodes: each node's part of it, and the way from the first node to the ranks on the others.

The first node's replica leads (`EngineLeader`); a further node runs its part and nothing else (`follow`). Commands of weights go as bytes
over one TCP connection each: a follower listens at its private address and sends a random text; the leader answers with the text's digest
under the follower's secret (HMAC-SHA256, RFC 2104), and the rank that it wants. From then on bytes go to and fro between the rank's Unix
socket and one of the same name that the first node has. They are JSON (`services.rollout.engine.receiver.command_session`): nothing is
unpickled.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

from services.rollout.engine.engine_process import EngineCommand, EngineProcess, EngineRendezvous
from services.rollout.engine.receiver_client import rank_socket
from services.rollout.replica_command import engine_log, engine_name, replica_command
from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.leader_lease import AWAY_SECONDS
from shared.bus.registry import ENGINE_NODE
from shared.model.final_exports import missing_exports
from shared.nodes.node_agent import NodeAgent
from shared.nodes.node_decisions import HEALTHY_SECONDS, OwnRanks, SeenNode
from shared.runtime import exit_codes
from shared.runtime.addresses import node_rank, own_address
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import StreamPair, pass_both_ways
from shared.service.service_base import Service

SPAN = 14  # the ports from the meeting point's on that SGLang takes with data-parallel attention: it adds up to 13 to it


class EngineRanks:
    """Starts and ends an engine's processes on this node.

    An engine that ends is no reason to end its services: the attempt counts as one whose nodes have lost each other, and the next begins.

    ``node``, ``nodes``: this one's index, and how many there are. ``secret``: returns the first node's, by which the engine's processes
    know each other. ``command``: makes the launch command. ``log_file``: the engine's output. Attributes: ``own``: how they are.
    ``engine``: the processes, while there are any."""

    def __init__(
        self, node: int, nodes: int, secret: Callable[[], str], command: Callable[[EngineRendezvous], EngineCommand], log_file: Path
    ) -> None:
        self._node, self._nodes, self._secret, self._command, self._log_file = node, nodes, secret, command, log_file
        self._asked = False
        self.own = OwnRanks()
        self.engine: EngineProcess | None = None

    def begin(self, number: int, address: str, port: int) -> None:
        """Starts the engine's part for an attempt. Port 0: SGLang's first rank opens the meeting point, at a free one."""
        port = port or free_ports_at(address, SPAN)
        self._asked = False
        self.engine = EngineProcess(self._command(EngineRendezvous(self._node, self._nodes, address, port, self._secret())), self._log_file)
        self.own = OwnRanks(number, port, ended=self.own.ended)

    def look(self) -> OwnRanks:
        """Returns how the processes are now."""
        if self.engine is not None and (fault := self.engine.fault()):
            self._end(f"its part of the engine {fault}")
        return self.own

    def ask_to_stop(self) -> None:
        """Ends the engine at once: who wanted its requests has aborted them before."""
        if self.engine is not None:
            self._asked = True
            self.engine.kill()

    def kill(self, reason: str) -> None:
        """Ends the processes at once, and returns when they are gone."""
        if self.look().running:
            self._end(reason)

    def _end(self, reason: str) -> None:
        assert self.engine is not None
        engine, self.engine = self.engine, None
        engine.stop(0)
        code = exit_codes.DONE if self._asked else exit_codes.FAILED
        self.own = OwnRanks(0, ended=self.own.running, code=code, reason=reason, consequence=True)


def free_ports_at(address: str, span: int) -> int:
    """Returns the first of so many free ports in a row. Raises OSError where 64 tries find none."""
    for _ in range(64):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first = int(held.enter_context(socket.create_server((address, 0))).getsockname()[1])
            for port in range(first + 1, first + span):
                held.enter_context(socket.create_server((address, port)))
            return first
    raise OSError(f"{address} has no {span} free ports in a row")


GREETING_SECONDS = 10.0  # the seconds for both sides to say who they are

# The seconds that a follower waits for its rank's socket: ranks open theirs when the engine has been told to, one after the other.
OPEN_SECONDS = 60.0

POLL_INTERVAL_S = 0.05


class RankUnreachable(MyxoError):
    """A rank of an engine on another node takes no commands."""


class RankEndpoint:
    """A follower's end. ``engine``: returns this node's part of the engine, where it runs. Attributes: ``port``: where it listens, 0: not
    yet. ``secret``: what others prove to know."""

    def __init__(self, engine: Callable[[], EngineProcess | None]) -> None:
        self._engine = engine
        self.port, self.secret = 0, secrets.token_hex(16)

    @contextlib.asynccontextmanager
    async def open(self, address: str) -> AsyncIterator[None]:
        """Listens while the body runs. Raises OSError."""
        server = await asyncio.start_server(self._come_in, address, 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _come_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            rank = await self._admitted(reader, writer)
            far = await self._rank(rank)
        except (RankUnreachable, OSError, ValueError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, MyxoError) else str(error)
            return _refuse(writer, reason)
        await pass_both_ways((reader, writer), far)

    async def _admitted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        text = secrets.token_hex(16)
        writer.write(f"{text}\n".encode())
        async with asyncio.timeout(GREETING_SECONDS):
            proof, _, rank = (await reader.readline()).decode().strip().partition(" ")
        if not hmac.compare_digest(proof.encode(), proof_of(self.secret, text).encode()):
            raise RankUnreachable("another secret than this node's")
        return int(rank)

    async def _rank(self, rank: int) -> StreamPair:
        async with asyncio.timeout(OPEN_SECONDS):
            while (engine := self._engine()) is None or not rank_socket(engine.receiver, rank).exists():
                await asyncio.sleep(POLL_INTERVAL_S)
        return await asyncio.open_unix_connection(str(rank_socket(engine.receiver, rank)))


class RankTunnels:
    """The first node's end: the sockets of the ranks on other nodes. ``nodes``: returns the other nodes by index, as their leases show
    them. ``secret``: reads the secret of one. ``share``: the ranks of each."""

    def __init__(self, nodes: Callable[[], Mapping[int, SeenNode]], secret: Callable[[int], Awaitable[str]], share: int) -> None:
        self._nodes, self._secret, self._share = nodes, secret, share
        self._servers: list[asyncio.Server] = []
        self._open: set[asyncio.Task[None]] = set()

    async def open(self, engine: Path) -> None:
        """Opens the sockets in the private directory of this node's part of the engine."""
        for node in self._nodes():
            for rank in range(node * self._share, (node + 1) * self._share):
                self._servers.append(await asyncio.start_unix_server(self._handler(node, rank), str(rank_socket(engine, rank))))

    async def close(self) -> None:
        """Ends all connections."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _handler(self, node: int, rank: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._carry((reader, writer), node, rank))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

        return handle

    async def _carry(self, near: StreamPair, node: int, rank: int) -> None:
        try:
            seen = self._nodes().get(node)
            if seen is None or seen.state is None or not seen.state.command_port:
                raise RankUnreachable("its lease names no port for commands")
            secret = await self._secret(node)
            async with asyncio.timeout(GREETING_SECONDS):
                reader, writer = await asyncio.open_connection(seen.state.address, seen.state.command_port)
                text = (await reader.readline()).decode().strip()
            writer.write(f"{proof_of(secret, text)} {rank}\n".encode())
            far = (reader, writer)
        except (OSError, TimeoutError, *BUS_ERRORS) as error:
            reason = f"rank {rank} on {self._nodes().get(node, f'node {node}')}: {type(error).__name__} {error}"
            return _refuse(near[1], reason)
        await pass_both_ways(near, far)


def proof_of(secret: str, text: str) -> str:
    """Returns the proof of knowing a secret, for a text that is used once."""
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def _refuse(writer: asyncio.StreamWriter, reason: str) -> None:
    writer.write(json.dumps({"ok": False, "error": reason}).encode() + b"\n")
    writer.close()


ATTEMPT_POLL_INTERVAL_S = 0.1


class EngineLeader:
    """Leads one engine's nodes. ``before``: awaited before each attempt. ``agent``: begins attempt after attempt. ``tunnels``: to the ranks
    on the other nodes."""

    def __init__(self, service: Service, before: Callable[[], Awaitable[None]]) -> None:
        rollout, patience = service.config.rollout, service.config.trainer.node_timeout
        nodes, name = rollout.nodes_per_engine, engine_name(service.config)
        self._service = service
        secret = secrets.token_hex(16)
        self._ranks = EngineRanks(0, nodes, lambda: secret, lambda meeting: replica_command(service, name, meeting), engine_log(service))
        # the service's own stopping must not end the engine before what it generates has been handed on
        self.agent = NodeAgent(
            service,
            service.subjects.engine_nodes(name),
            0,
            nodes,
            patience,
            self._ranks,
            stopping=asyncio.Event(),
            secret=secret,  # for the followers: no one comes in here
            show=self._show,
            before=before,
            healthy=rollout.engine_start_timeout + HEALTHY_SECONDS,  # it has served for so long, then
        )
        self.tunnels = RankTunnels(lambda: self.agent.seen, self.agent.secret_of, rollout.rollout_num_gpus_per_engine // nodes)

    @property
    def ended(self) -> str:
        """Returns why this node's part of the last attempt has ended."""
        return self._ranks.own.reason

    @property
    def further_nodes(self) -> list[str]:
        """Returns the addresses of the other nodes, as far as they are known, in order."""
        return [node.point.rpartition(":")[0] for _, node in sorted(self.agent.seen.items()) if node.point]

    async def begun(self, last: EngineProcess | None) -> EngineProcess:
        """Returns this node's part of the engine once an attempt other than ``last``'s has begun. The agent has the deadline."""
        while (engine := self._ranks.engine) is None or engine is last:
            await asyncio.sleep(ATTEMPT_POLL_INTERVAL_S)
        return engine

    def _show(self, state: str, detail: str) -> None:
        self._service.detail = "" if state in ("ready", "stopping") else f"{state} {detail}"


# The time for which the ranks' thread waits for the first node's secret: beyond the deadline of reading it, should the loop be gone.
SECRET_SECONDS = AWAY_SECONDS + 10.0

PHASE_SECONDS = 5.0  # the interval at which a follower asks whether the run has ended


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
    endpoint = RankEndpoint(lambda: ranks.engine)
    async with endpoint.open(own_address()):
        agent = NodeAgent(
            service,
            service.subjects.engine_nodes(name),
            rank,
            nodes,
            config.trainer.node_timeout,
            ranks,
            leave_seconds=0.0,
            command_port=lambda: endpoint.port,
            secret=endpoint.secret,
        )
        async with service.background(_end_with_run(service)):
            await agent.run()


async def _end_with_run(service: Service) -> None:
    """Has the service stop once the run has ended: its leader may have left without a word. A trainer that shares the engine's GPUs may
    need the engine while final weights are missing."""
    trainer, ended = service.config.trainer, float("inf")
    while True:
        await asyncio.sleep(PHASE_SECONDS)
        try:
            if (phase := await runs.phase(service.bus, service.run)) in runs.ENDS:
                ended = min(ended, time.monotonic())
                needed = trainer.colocate and phase == runs.FINISHED and missing_exports(service.config)
                if not needed or time.monotonic() > ended + trainer.collective_timeout:
                    service.stopping.set()
        except (MyxoError, *BUS_ERRORS):
            continue  # the bus is away: nothing is known
