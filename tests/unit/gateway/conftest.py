"""The server that the tests of the wire formats ask with the houses' own clients."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.wire_server import PLAIN, WireServer, wire_server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[WireServer]:
    async with wire_server() as served:
        yield served


@pytest.fixture
def server(served: WireServer) -> WireServer:
    """The server as it is before anybody has asked it anything."""
    served.answers, served.turns, served.constraints = [PLAIN], [], "refuse"
    return served
