"""An agent behind a URL, asked by the agent that comes with Myxo."""

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from shared.agents.http_agent import AgentServiceFailed, play
from shared.runtime.errors import ConfigError
from tests.support.http_server import http_server

DATA = {"messages": [{"role": "user", "content": "ü?"}], "label": "4", "metadata": {"level": 2}}


async def test_it_is_sent_what_an_agent_takes_and_its_reward_is_the_rollouts() -> None:
    given: list[Any] = [{"reward": 0.5}, {"reward": {"right": 1.0, "short": 0.25}}, {"reward": None, "more": "ignored"}]
    async with http_server(lambda asked, number: given[number]) as server:
        url = server.url.replace("://", "://me:hush@") + "/play?game=1"
        rewards = [await play({**DATA, "options": {"url": url, "level": 3}}, "http://gateway:8300/v1", "sk-myxo-1") for _ in given]
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
            await play({**DATA, "options": {"url": f"{server.url}/play"}}, "http://gateway:8300/v1", "sk-myxo-1")
    assert str(failed.value).startswith(f"the agent at {server.url}/play: ") and reason in str(failed.value)


async def test_one_that_is_starting_is_waited_for_and_one_that_is_away_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/play"
    with pytest.raises(AgentServiceFailed, match="cannot be reached within 0.5 s: "):
        await play({**DATA, "options": {"url": url, "start_seconds": 0.5}}, "http://gateway:8300/v1", "sk-myxo-1")
    application = web.Application()

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"reward": 1})

    application.router.add_post("/play", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    asked = asyncio.create_task(play({**DATA, "options": {"url": url, "level": 3}}, "http://gateway:8300/v1", "sk-myxo-1"))
    await asyncio.sleep(0.3)  # it has been refused once
    await web.TCPSite(runner, "127.0.0.1", int(url.rsplit(":", 1)[1].split("/")[0])).start()
    assert await asked == 1
    await runner.cleanup()


async def test_options_that_are_wrong_are_named() -> None:
    for options, words in [({}, "rollout.agent_options.url"), ({"url": "ftp://there"}, "rollout.agent_options.url = 'ftp://there'")]:
        with pytest.raises(ConfigError, match=words):
            await play({**DATA, "options": options}, "http://gateway:8300/v1", "sk-myxo-1")
