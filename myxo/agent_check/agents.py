"""An agent to be tried: a function, a command, or a service behind a URL. Each is called as a rollout service calls it."""

import asyncio
import inspect
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from shared.agents import http_agent
from shared.hooks import reward_values
from shared.hooks.loading import load_agent
from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import parse_json

Played = Callable[[Mapping[str, Any], str, str], Awaitable[object]]
"""Plays a rollout of (data, base_url, api_key); returns what the agent gave for a reward."""


class AgentFailed(MyxoError):
    """The agent ended without a reward."""


def function_agent(path: str) -> Played:
    """Returns the agent at ``package.module:function``. Raises ConfigError."""
    function = load_agent("AGENT", path)

    async def play(data: Mapping[str, Any], base_url: str, api_key: str) -> object:
        if inspect.iscoroutinefunction(function):
            return await function(dict(data), base_url, api_key)
        return await asyncio.to_thread(function, dict(data), base_url, api_key)

    return play


def url_agent(url: str) -> Played:
    """Returns the agent that is a service."""

    async def play(data: Mapping[str, Any], base_url: str, api_key: str) -> object:
        options = {**data["options"], "url": url, "start_seconds": 5.0}
        return await http_agent.play({**data, "options": options}, base_url, api_key)

    return play


def command_agent(command: Sequence[str]) -> Played:
    """Returns the agent that is a command."""

    async def play(data: Mapping[str, Any], base_url: str, api_key: str) -> object:
        bare = base_url.removesuffix("/v1")
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "ANTHROPIC_BASE_URL": bare, "ANTHROPIC_API_KEY": api_key}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **own})
        try:
            out, err = await process.communicate(json.dumps(dict(data)).encode() + b"\n")
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise AgentFailed(f"ended with {process.returncode}: {' '.join(err.decode(errors='replace').split())[-300:]}")
        lines = [line for line in out.decode(errors="replace").splitlines() if line.strip()]
        try:
            return parse_json(lines[-1]) if lines else None
        except ValueError:
            raise AgentFailed(f"its last line is no reward in JSON: {lines[-1][:200]}") from None

    return play


def shown_reward(result: object) -> str:
    """Returns a result in words. Raises ValueError where it is no reward."""
    if result is None:
        return "no reward: the run's own scores it"
    given = reward_values.plain(result)
    reward_values.read(given, None)
    return f"reward {given:g}" if isinstance(given, float) else "rewards " + ", ".join(f"{name} {value:g}" for name, value in given.items())
