"""The links between a run's processes and its servers: a proxy that passes everything on, until it is told to cut or to delay.

A cut link swallows nothing: what is sent waits in both directions, as on a network that is away, and continues when it is back. New
connections are taken and hear nothing.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 16
_NAME = re.compile(rb'"name":\s*"[^"/]*/([a-z]+)')

EVERYBODY = ""


@dataclass
class LinkState:
    """``cut``: clients whose bytes wait, by the name of their service; `EVERYBODY`: all. ``delay_s``: of every chunk, each way."""

    cut: set[str]
    delay_s: float = 0.0

    def holds(self, client: str) -> bool:
        return EVERYBODY in self.cut or client in self.cut


class LinkProxy:
    """One server's links. ``address``: where it listens, ``server``: where the server does; (host, port), or the path of a socket.

    Attributes:
        state: what happens to the links.
    """

    def __init__(self, address: tuple[str, int] | str, server: tuple[str, int] | str) -> None:
        self._address, self._server = address, server
        self.state = LinkState(set())
        self._listening: asyncio.Server | None = None
        self._held: socket.socket | None = None
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Listens, and keeps others from the server's port, which it is told of long before it listens there."""
        if isinstance(self._server, tuple):
            self._held = socket.socket()
            with contextlib.suppress(OSError):  # connections of its last life may be on their way out
                self._held.bind(self._server)
                self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if isinstance(self._address, str):
            self._listening = await asyncio.start_unix_server(self._connected, self._address)
        else:
            self._listening = await asyncio.start_server(self._connected, *self._address)

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
        if self._listening is not None:
            self._listening.close()

    def set(self, state: LinkState) -> None:
        """Changes what happens to the links, from now on."""
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = [""]

        def heard(data: bytes) -> None:
            if not client[0] and (found := _NAME.search(data)):
                client[0] = found[1].decode()

        try:
            await self._passing(client)
            if isinstance(self._server, str):
                answers, requests = await asyncio.open_unix_connection(self._server)
            else:
                answers, requests = await asyncio.open_connection(*self._server)
        except OSError:  # the server is down: so is the connection
            writer.close()
            return
        ways = [self._pass(reader, requests, client, heard), self._pass(answers, writer, client, lambda _: None)]
        tasks = [asyncio.create_task(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for end in (writer, requests):
            end.close()

    async def _passing(self, client: list[str]) -> None:
        while self.state.holds(client[0]):
            await self._changed.wait()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: list[str], heard: Callable[[bytes], None]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                heard(data)
                if self.state.delay_s:
                    await asyncio.sleep(self.state.delay_s)
                await self._passing(client)
                writer.write(data)
                await writer.drain()


@dataclass(frozen=True)
class ProxiedAddresses:
    """Where services find a run's servers (``nats_port``, ``valkey_path``), and where these listen themselves."""

    nats_port: int
    own_nats_port: int
    valkey_path: str
    own_valkey_path: str

    def as_text(self) -> str:
        return f"{self.nats_port} {self.own_nats_port} {self.valkey_path} {self.own_valkey_path}"

    @classmethod
    def from_text(cls, text: str) -> "ProxiedAddresses":
        port, own_port, path, own_path = text.split()
        return cls(int(port), int(own_port), path, own_path)

    @classmethod
    def fresh(cls, directory: Path) -> "ProxiedAddresses":
        """Returns free ones. ``directory``: where the sockets lie; its path is short."""
        from shared.process.embedded_servers import free_port

        return cls(free_port(), free_port(), str(directory / "v.sock"), str(directory / "own" / "v.sock"))


ADDRESSES = "MYXO_CHAOS_ADDRESSES"
"""The variable that tells the launcher of `ProxiedAddresses`."""
