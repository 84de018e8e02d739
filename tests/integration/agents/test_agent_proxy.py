"""The way to an agent in a network of its own, over real connections on loopback."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from shared.agents import agent_proxy
from shared.agents.http_agent import AgentServiceFailed, play
from shared.process.embedded_servers import free_port
from shared.runtime.addresses import HttpAddress
from shared.runtime.errors import ConfigError
from tests.support.http_server import http_server
from tests.support.waiting import until

SECONDS = 60


@contextlib.asynccontextmanager
async def proxy(agent: int) -> AsyncIterator[int]:
    """A proxy to an agent at a port of loopback; its own port."""
    port = free_port()
    serving = asyncio.create_task(agent_proxy.serve(HttpAddress("127.0.0.1", port), HttpAddress("127.0.0.1", agent)))
    try:
        await until(lambda: _listens(port), "the proxy to open")
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
    async with server, asyncio.timeout(SECONDS), proxy(server.sockets[0].getsockname()[1]) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = os.urandom(1 << 20).replace(b".", b"!") + b"."
        writer.write(sent)
        assert await reader.read(-1) == sent  # to the end of the connection, which the agent closed
        gone.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"play")
        writer.close()
        await gone.wait()  # a caller that leaves is seen to


async def test_an_agent_that_is_not_there_yet_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    long = "?" * (8 << 20)  # more than the sockets hold: it is being sent when the proxy answers
    data = {"messages": [{"role": "user", "content": long}]}
    async with proxy(absent := free_port()) as port, asyncio.timeout(SECONDS):
        url = f"http://127.0.0.1:{port}/play"
        reason = rf"cannot be reached within 0.5 s: the agent at 127.0.0.1:{absent} cannot be reached: "
        with pytest.raises(AgentServiceFailed, match=reason):
            await play({**data, "options": {"url": url, "start_seconds": 0.5}}, "http://gateway:8300/v1", "sk-myxo-1")
        asked = asyncio.create_task(play({**data, "options": {"url": url}}, "http://gateway:8300/v1", "sk-myxo-1"))
        before = len(said := capsys.readouterr().err)
        assert f"the agent at 127.0.0.1:{absent} cannot be reached" in said

        def refused() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return len(said) > before

        await until(refused, "that the proxy has refused it")
        async with http_server(lambda asked, number: {"reward": 1}, port=absent) as server:
            assert await asked == 1
            assert len(server.asked) == 1 and server.asked[0]["data"]["messages"] == data["messages"]


async def test_an_agent_that_leaves_in_the_middle_is_not_asked_again() -> None:
    asked = 0

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        begun = await reader.read(1)
        asked += len(begun)
        writer.close()

    server = await asyncio.start_server(agent, "127.0.0.1", 0)
    async with server, asyncio.timeout(SECONDS), proxy(server.sockets[0].getsockname()[1]) as port:
        with pytest.raises(AgentServiceFailed):
            await play({"options": {"url": f"http://127.0.0.1:{port}/play"}}, "http://gateway:8300/v1", "sk-myxo-1")
    assert asked == 1


async def test_connections_over_the_most_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_proxy, "CONNECTIONS", 0)
    async with http_server(lambda asked, number: {"reward": 1}) as server, proxy(int(server.url.rsplit(":", 1)[1])) as port:
        with pytest.raises(AgentServiceFailed, match="0 connections are open"):
            options = {"url": f"http://127.0.0.1:{port}/play", "start_seconds": 0}
            await play({"options": options}, "http://gateway:8300/v1", "sk-myxo-1")


async def test_the_private_address_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:4222")
    monkeypatch.delenv("MYXO_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"HOST:PORT = 'private:8600': the network of NATS is not there"):
        await agent_proxy.serve(HttpAddress("private", 8600), HttpAddress("agent", 8600))


@pytest.mark.parametrize("words", [[], ["private:8600"], ["private", "agent:8600"], ["127.0.0.1:0", "agent"]])
def test_wrong_arguments_are_named(words: list[str]) -> None:
    ended = subprocess.run([sys.executable, "-m", "shared.agents.agent_proxy", *words], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 2 and ("HOST:PORT" in ended.stderr or "AGENT:PORT" in ended.stderr)
