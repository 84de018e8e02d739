"""The links between a job's nodes: each node asks every node of a lower rank for a sign of life, over a TCP connection of their own.

A lease says that a node reaches the bus. Two nodes that both reach it may not reach each other, and then their ranks wait inside a
collective for as long as its deadline allows. Here a node knows within seconds which other one does not answer, and says so in its lease.

What travels are eight bytes, and the same eight bytes back: a link that is cut in one direction alone is noticed, too, and nothing that
arrives is interpreted. Where a node is asked, its *point*, is an address and a port, written ``address:port``.
"""

import asyncio
import contextlib
from collections.abc import Iterable

import structlog

from shared.bus.leader_lease import clock
from shared.runtime.tasks import cancelled

BEAT_BYTES = 8
"""The bytes of a question, and of its answer: the question's number."""

CONNECTIONS_PER_NODE = 4
"""The most connections at once for each node of the job: one is used, and those that were cut off are still open for a while."""


class NodeLinks:
    """One node's ends of its links. Everything runs in the event loop that calls it.

    Args:
        nodes: how many the job has. silence_s: seconds without an answer after which a link counts as down.
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
                await self._ask_until_silent(point)
            await asyncio.sleep(self._interval_s)

    async def _ask_until_silent(self, point: str) -> None:
        """Asks over one connection. Raises OSError, EOFError or TimeoutError when there is no answer."""
        address, _, port = point.rpartition(":")
        async with asyncio.timeout(self._answer_s):
            reader, writer = await asyncio.open_connection(address, int(port))
        try:
            number = 0
            while True:
                number += 1
                question = number.to_bytes(BEAT_BYTES)
                writer.write(question)
                async with asyncio.timeout(self._answer_s):
                    if await reader.readexactly(BEAT_BYTES) != question:
                        raise ConnectionError("another answer than the one to the question")
                self._heard[point] = clock()
                await asyncio.sleep(self._interval_s)
        finally:
            writer.transport.abort()  # what is still to be sent is of no use

    # --- answering

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # a server's handler runs as one
        try:
            if len(self._asked_by) < self._most:
                self._asked_by.add(task)
                # cancelled by `_close_server` alone; asyncio would log it as an error of its own
                with contextlib.suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
                    await self._answer_until_silent(reader, writer)
        finally:
            self._asked_by.discard(task)
            writer.transport.abort()

    async def _answer_until_silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(self.silence_s):
                writer.write(await reader.readexactly(BEAT_BYTES))
                await writer.drain()
