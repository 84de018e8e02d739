"""The way to an agent in a network of its own, over real connections on loopback."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from shared.agents import agent_door
from shared.runtime.embedded_servers import free_port
from shared.runtime.errors import ConfigError
from shared.runtime.http_address import HttpAddress
from tests.support.waiting import until

SECONDS = 60


@contextlib.asynccontextmanager
async def door(agent: int) -> AsyncIterator[int]:
    """A door to an agent at a port of loopback; its own port."""
    port = free_port()
    serving = asyncio.create_task(agent_door.serve(HttpAddress("127.0.0.1", port), HttpAddress("127.0.0.1", agent)))
    try:
        await until(lambda: _listens(port), "the door to open")
        yield port
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_a_connection_is_passed_on_and_ends_with_either_end() -> None:
    gone = asyncio.Event()

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # its answer was not read any more
            while data := await reader.read(1 << 16):
                writer.write(data)
                if data.endswith(b"."):
                    writer.close()
                    return
        gone.set()
        writer.close()

    server = await asyncio.start_server(agent, "127.0.0.1", 0)
    async with server, asyncio.timeout(SECONDS), door(server.sockets[0].getsockname()[1]) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = os.urandom(1 << 20).replace(b".", b"!") + b"."
        writer.write(sent)
        assert await reader.read(-1) == sent  # to the end of the connection, which the agent closed
        gone.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"play")
        writer.close()
        await gone.wait()  # a caller that leaves is seen to


async def test_an_agent_that_is_not_there_closes_its_callers_connection(capsys: pytest.CaptureFixture[str]) -> None:
    async with door(absent := free_port()) as port, asyncio.timeout(SECONDS):
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read(-1) == b""
    assert f"the agent at 127.0.0.1:{absent} cannot be reached" in capsys.readouterr().err


async def test_the_private_address_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:4222")
    monkeypatch.delenv("MYXO_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"HOST:PORT = 'private:8600': the network of NATS is not there"):
        await agent_door.serve(HttpAddress("private", 8600), HttpAddress("agent", 8600))


@pytest.mark.parametrize("words", [[], ["private:8600"], ["private", "agent:8600"], ["127.0.0.1:0", "agent"]])
def test_wrong_arguments_are_named(words: list[str]) -> None:
    ended = subprocess.run([sys.executable, "-m", "shared.agents.agent_door", *words], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 2 and ("HOST:PORT" in ended.stderr or "AGENT:PORT" in ended.stderr)
