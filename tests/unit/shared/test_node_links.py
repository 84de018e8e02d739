"""Nodes ask each other for a sign of life: who does not answer is named, and answers from elsewhere change nothing."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from shared.nodes.node_agent import CONNECTIONS_PER_NODE, NodeLinks
from tests.support.waiting import until

HOME = "127.0.0.1"
SILENCE_S = 1.0


@pytest.fixture
async def links() -> AsyncIterator[list[NodeLinks]]:
    """Those of two nodes; the second asks the first."""
    made = [NodeLinks(2, SILENCE_S) for _ in range(2)]
    for each in made:
        await each.listen(HOME)
    made[1].ask([made[0].point])
    yield made
    for each in made:
        await each.close()


async def test_a_node_that_stops_answering_is_silent_until_it_answers_again(links: list[NodeLinks]) -> None:
    first, second = links
    point = first.point
    assert second.silent() == []
    await answered_for(second, point, 1.5 * SILENCE_S)
    await first.close()
    await until(lambda: second.silent() == [point], "the silence", 20, 0.05)
    server = await asyncio.start_server(first._answer, HOME, int(point.rpartition(":")[2]))
    await until(lambda: second.silent() == [], "another answer", 20, 0.05)
    server.close()
    second.ask([])
    assert second.silent() == [], "nobody asks there any more"


async def test_a_node_that_takes_connections_and_says_nothing_is_silent(links: list[NodeLinks]) -> None:
    def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    server = await asyncio.start_server(say_nothing, HOME, 0)
    point = f"{HOME}:{server.sockets[0].getsockname()[1]}"
    links[1].ask([links[0].point, point])
    await until(lambda: links[1].silent() == [point], "the silence", 20, 0.05)
    server.close()


async def test_strangers_neither_crash_it_nor_take_all_of_its_connections(links: list[NodeLinks]) -> None:
    first, second = links
    port = int(first.point.rpartition(":")[2])
    crowd = [await asyncio.open_connection(HOME, port) for _ in range(3 * CONNECTIONS_PER_NODE)]
    for _, writer in crowd:
        writer.write(os.urandom(13))
    await answered_for(second, first.point, 2 * SILENCE_S)  # the connection that was there first stays
    for reader, _ in crowd:
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while await reader.read(100):  # who says nothing more is let go
                    pass
    for _, writer in crowd:
        writer.close()


async def answered_for(links: NodeLinks, point: str, seconds: float) -> None:
    """Returns once a point has answered for so long, and asserts that it was never silent."""
    since = links._heard[point]

    def answered() -> bool:
        assert links.silent() == []
        return links._heard[point] > since + seconds

    await until(answered, "answers", 30, 0.05)


async def test_an_address_that_is_not_this_machines_is_no_error() -> None:
    links = NodeLinks(2, SILENCE_S)
    await links.listen("192.0.2.1")  # RFC 5737: nobody's
    assert links.point == ""
    await links.listen(HOME)
    assert links.point.startswith(f"{HOME}:")
    await links.close()
