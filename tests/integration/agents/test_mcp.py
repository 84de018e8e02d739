"""The agents that come with Myxo: one that asks an agent behind a URL, and one that has the tools of real MCP servers."""

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shared.agents.http_agent import AgentServiceFailed
from shared.agents.http_agent import play as over_http
from shared.agents.mcp_agent import HttpServer, McpServerFailed, McpTools, Server, open_tools, play
from shared.process.embedded_servers import free_port
from shared.runtime.errors import ConfigError
from tests.support.http_server import http_server, served
from tests.support.waiting import until

DATA = {"messages": [{"role": "user", "content": "ü?"}], "label": "4", "metadata": {"level": 2}}


async def test_it_is_sent_what_an_agent_takes_and_its_reward_is_the_rollouts() -> None:
    given: list[Any] = [{"reward": 0.5}, {"reward": {"right": 1.0, "short": 0.25}}, {"reward": None, "more": "ignored"}]
    async with http_server(lambda asked, number: given[number]) as server:
        url = server.url.replace("://", "://me:hush@") + "/play?game=1"
        rewards = [await over_http({**DATA, "options": {"url": url, "level": 3}}, "http://gateway:8300/v1", "sk-myxo-1") for _ in given]
    assert rewards == [0.5, {"right": 1.0, "short": 0.25}, None]
    assert server.asked[0] == {
        "data": {**DATA, "options": {"url": url, "level": 3}},
        "base_url": "http://gateway:8300/v1",
        "api_key": "sk-myxo-1",
    }
    assert server.headers[0]["Authorization"].startswith("Basic ")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (web.json_response({"error": "no such\ntask"}, status=500), "HTTP 500: no such task"),
        (web.Response(status=404, text="<html>"), "HTTP 404"),
        (web.Response(status=302, headers={"Location": "http://127.0.0.1:1"}), "HTTP 302"),
        (web.Response(text="well played"), "answered well played; expected "),
        (web.json_response([1.0]), "answered [1.0]; expected "),
        (web.json_response({"rewards": 1}), """answered {"rewards": 1}; expected {"reward": a number"""),
        (web.Response(text="[" * 100_000), "expected "),
        (web.Response(text=" " * (5 << 20)), "answered with more than 4194304 bytes"),
    ],
)
async def test_whatever_it_answers_otherwise_fails_the_rollout(answer: web.Response, reason: str) -> None:
    async with http_server(lambda asked, number: answer) as server:
        with pytest.raises(AgentServiceFailed) as failed:
            await over_http({**DATA, "options": {"url": f"{server.url}/play"}}, "http://gateway:8300/v1", "sk-myxo-1")
    assert str(failed.value).startswith(f"the agent at {server.url}/play: ") and reason in str(failed.value)


async def test_one_that_is_starting_is_waited_for_and_one_that_is_away_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/play"
    with pytest.raises(AgentServiceFailed, match="cannot be reached within 0.5 s: "):
        await over_http({**DATA, "options": {"url": url, "start_seconds": 0.5}}, "http://gateway:8300/v1", "sk-myxo-1")

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"reward": 1})

    asked = asyncio.create_task(over_http({**DATA, "options": {"url": url, "level": 3}}, "http://gateway:8300/v1", "sk-myxo-1"))
    await asyncio.sleep(0.3)  # it has been refused once
    async with served(web.post("/play", answer), port=int(url.rsplit(":", 1)[1].split("/")[0])):
        assert await asked == 1


async def test_options_that_are_wrong_are_named() -> None:
    for options, words in [({}, "rollout.agent_options.url"), ({"url": "ftp://there"}, "rollout.agent_options.url = 'ftp://there'")]:
        with pytest.raises(ConfigError, match=words):
            await over_http({**DATA, "options": options}, "http://gateway:8300/v1", "sk-myxo-1")


CALCULATOR = [sys.executable, str(Path(__file__).parents[2] / "support" / "mcp_calculator.py")]
SECONDS = 60.0


async def outcome(tools: McpTools, name: str, arguments: str) -> str:
    try:
        return await tools.call(name, arguments)
    except McpServerFailed as failed:
        return f"failed: {failed}"


async def test_what_the_model_does_wrong_is_told_to_it_and_what_the_server_does_is_its_failure() -> None:
    async with open_tools({"calculator": CALCULATOR}, SECONDS) as tools:
        assert [tool["function"]["name"] for tool in tools.offered] == ["add", "divide", "wait", "recite", "leave"]
        assert tools.offered[0]["function"]["description"] == "Adds two integers."
        assert tools.offered[0]["function"]["parameters"]["required"] == ["a", "b"]
        assert await tools.call("add", '{"a": 40, "b": 2}') == "42"
        for name, arguments, said in [
            ("divide", '{"a": 1, "b": 0}', "error: Error executing tool divide"),
            ("add", '{"a": "x"}', "error: Error executing tool add: 2 validation errors"),
            ("multiply", "{}", "error: there is no tool multiply; the tools are add, divide, wait, recite, leave"),
            ("add", '{"a": ', "error: the arguments are no JSON: "),
            ("add", "[1, 2]", "error: the arguments must be a JSON object"),
        ]:
            assert (await tools.call(name, arguments)).startswith(said)
        tools._characters = 1000
        recited = await tools.call("recite", '{"length": 5000000}')
        assert recited == f"{'x' * 500}\n… 4999000 characters …\n{'x' * 500}"
        tools._seconds = 0.5
        late = "failed: MCP server calculator: tool wait did not answer within 0.5 s"
        assert await outcome(tools, "wait", '{"seconds": 600}') == late
        tools._seconds = SECONDS
        assert await outcome(tools, "leave", "{}") == "failed: MCP server calculator: tool leave: Connection closed"


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (["/no/such/program"], "FileNotFoundError"),
        pytest.param([sys.executable, "-c", "print('hello')"], "MCPError: Connection closed", marks=pytest.mark.extra),
        ("http://127.0.0.1:9/mcp", "ConnectError"),
        ([sys.executable, "-c", "import time; time.sleep(600)"], "did not list its tools within 2 s"),
        pytest.param([*CALCULATOR, "many"], "ValueError: lists more than 512 tools", marks=pytest.mark.extra),
    ],
)
async def test_a_server_that_cannot_be_used_is_named(server: Server, reason: str) -> None:
    with pytest.raises(McpServerFailed, match=f"^MCP server mine: {reason}"):
        async with open_tools({"mine": server}, 2.0 if "within" in reason else SECONDS):
            pass


async def test_a_server_gets_its_headers_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = list[bytes]()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    asked = HttpServer(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp", headers={"X-Team": "red"}, key_variable="MINE")
    async with server:
        with pytest.raises(ConfigError, match="MINE"):
            async with open_tools({"mine": asked}, SECONDS):
                pass
        monkeypatch.setenv("MINE", "s3cret")
        with pytest.raises(McpServerFailed, match=r"^MCP server mine: (?!.*s3cret)"):
            async with open_tools({"mine": asked}, SECONDS):
                pass
    assert b"authorization: bearer s3cret\r\n" in heads[0].lower() and b"x-team: red\r\n" in heads[0].lower()


async def test_the_model_calls_tools_of_servers_of_both_kinds_until_it_has_an_answer() -> None:
    port = free_port()
    shared = await asyncio.create_subprocess_exec(*CALCULATOR, str(port))
    unread = {"role": "assistant", "content": "<tool_call>{add}</tool_call>"}
    unread["malformed_tool_calls"] = [{"text": "<tool_call>{add}</tool_call>", "status": "invalid_json"}]  # type: ignore[assignment]
    said = [
        unread,
        call(("one", "add", '{"a": 1, "b": 2}'), ("two", "add", '{"a": 30, "b": ')),
        call(("three", "add", '{"a": 3, "b": 4}')),
        {"role": "assistant", "content": "It is 7."},
    ]

    def answer(asked: dict[str, Any], number: int) -> Any:
        choice = {"index": 0, "message": said[number], "finish_reason": "stop"}
        return {"id": "x", "object": "chat.completion", "created": 1, "model": asked["model"], "choices": [choice]}

    async def listening() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
        except OSError:
            return False
        return True

    try:
        await until(listening, "the server over HTTP", SECONDS)
        async with http_server(answer) as server:
            servers: dict[str, Server] = {"http": f"http://127.0.0.1:{port}/mcp"}
            data = {
                "messages": [{"role": "user", "content": "1 + 2 + 4?"}],
                "model": "m",
                "options": {"servers": servers, "seconds": SECONDS},
            }
            await play(data, f"{server.url}/v1", "key")
            assert len(server.asked) == 4
            _, given_back, told, *last = server.asked[-1]["messages"]
            assert given_back == unread, "the text is given back as it was sampled"
            assert told["role"] == "user" and told["content"].startswith("error: invalid_json") and "{add}" in told["content"]
            assert [message["role"] for message in last] == ["assistant", "tool", "tool", "assistant", "tool"]
            assert [message["content"] for message in last if message["role"] == "tool"][::2] == ["3", "7"]
            assert last[2]["content"].startswith("error: the arguments are no JSON") and last[2]["tool_call_id"] == "two"
            assert [tool["function"]["name"] for tool in server.asked[0]["tools"]] == ["add", "divide", "wait", "recite", "leave"]

            with pytest.raises(McpServerFailed, match="MCP server own: its tool add has the name of one of http's"):
                await play({**data, "options": {"servers": {**servers, "own": CALCULATOR}, "seconds": SECONDS}}, f"{server.url}/v1", "key")
            said[:] = [call(("again", "add", '{"a": 1, "b": 1}'))] * 9
            server.asked.clear()
            await play({**data, "options": {"servers": servers, "turns": 2}}, f"{server.url}/v1", "key")
            assert len(server.asked) == 2, "no more turns than it may have"
    finally:
        shared.kill()
        await shared.wait()


def call(*calls: tuple[str, str, str]) -> dict[str, Any]:
    """An answer that calls tools: id, name and arguments of each."""
    listed = [{"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}} for id_, name, arguments in calls]
    return {"role": "assistant", "content": None, "tool_calls": listed}
