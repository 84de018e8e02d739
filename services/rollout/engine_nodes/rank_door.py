"""The way from an engine's first node to the ranks on the others: commands of weights, as bytes, over one TCP connection each.

A follower listens at its private address. It says a random text; who connects answers with the text's digest under the follower's secret
(`NodeSecret`; HMAC-SHA256, RFC 2104), and the rank that it wants. From then on bytes go to and fro between the rank's Unix socket and one
of the same name that the first node has. They are JSON (`services.rollout.engine.receiver.command_session`): nothing is unpickled.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

from services.rollout.engine.engine_process import EngineProcess
from shared.bus.bus_errors import BUS_ERRORS
from shared.nodes.node_decisions import SeenNode
from shared.runtime.errors import MyxoError

GREETING_SECONDS = 10.0
"""The seconds for both sides to say who they are."""

OPEN_SECONDS = 60.0
"""The seconds that a follower waits for its rank's socket: ranks open theirs when the engine has been told to, one after the other."""

CHUNK_BYTES = 1 << 20
POLL_INTERVAL_S = 0.05

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RankUnreachable(MyxoError):
    """A rank of an engine on another node takes no commands."""


def rank_socket(engine: Path, rank: int) -> Path:
    """Returns the socket of a rank in an engine's private directory."""
    return engine / f"rank-{rank}.sock"


class RankDoor:
    """A follower's end.

    Args:
        engine: returns this node's part of the engine, where it runs.

    Attributes:
        port: where it listens, 0: not yet. secret: what others prove to know.
    """

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
            writer.write(json.dumps({"ok": False, "error": reason}).encode() + b"\n")
            writer.close()
            return
        await joined((reader, writer), far)

    async def _admitted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        text = secrets.token_hex(16)
        writer.write(f"{text}\n".encode())
        async with asyncio.timeout(GREETING_SECONDS):
            proof, _, rank = (await reader.readline()).decode().strip().partition(" ")
        if not hmac.compare_digest(proof.encode(), proof_of(self.secret, text).encode()):
            raise RankUnreachable("another secret than this node's")
        return int(rank)

    async def _rank(self, rank: int) -> Streams:
        async with asyncio.timeout(OPEN_SECONDS):
            while (engine := self._engine()) is None or not rank_socket(engine.receiver, rank).exists():
                await asyncio.sleep(POLL_INTERVAL_S)
        return await asyncio.open_unix_connection(str(rank_socket(engine.receiver, rank)))


class RankTunnels:
    """The first node's end: the sockets of the ranks on other nodes.

    Args:
        nodes: returns the other nodes by index, as their leases show them. secret: reads the secret of one. share: the ranks of each.
    """

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

    async def _carry(self, near: Streams, node: int, rank: int) -> None:
        try:
            far = await self._entered(node, rank)
        except (OSError, TimeoutError, *BUS_ERRORS) as error:
            reason = f"rank {rank} on {self._nodes().get(node, f'node {node}')}: {type(error).__name__} {error}"
            near[1].write(json.dumps({"ok": False, "error": reason}).encode() + b"\n")
            near[1].close()
            return
        await joined(near, far)

    async def _entered(self, node: int, rank: int) -> Streams:
        seen = self._nodes().get(node)
        if seen is None or seen.state is None or not seen.state.door:
            raise RankUnreachable("its lease names no port for commands")
        secret = await self._secret(node)
        async with asyncio.timeout(GREETING_SECONDS):
            reader, writer = await asyncio.open_connection(seen.state.address, seen.state.door)
            text = (await reader.readline()).decode().strip()
        writer.write(f"{proof_of(secret, text)} {rank}\n".encode())
        return reader, writer


def proof_of(secret: str, text: str) -> str:
    """Returns the proof of knowing a secret, for a text that is used once."""
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


async def joined(one: Streams, other: Streams) -> None:
    """Passes bytes to and fro until either side ends, and closes both."""
    ways = [asyncio.ensure_future(_pass(one[0], other[1])), asyncio.ensure_future(_pass(other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (one, other):
            writer.close()
        await asyncio.gather(*ways, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
