"""An agent that lets the model use the tools of MCP servers: a chat in which each call is made, until an answer has none."""

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from shared.agents.mcp_tools import open_tools

MODEL = "policy"
"""The gateway serves one model, whatever its name."""


async def play(data: Mapping[str, Any], base_url: str, api_key: str) -> None:
    """Plays one rollout; the run's reward scores it. An agent of the user's may call it, and give a reward of its own.

    Args:
        data: as every agent's; ``mcp`` in it holds ``servers``, ``turns`` (the most answers of the model) and ``seconds`` (see
            `shared.agents.mcp_tools.open_tools`). base_url, api_key: of the gateway's session.

    Raises McpServerFailed and openai's errors: the rollout has failed.
    """
    settings, messages = data["mcp"], [*data["messages"]]
    async with open_tools(settings["servers"], settings["seconds"]) as tools, AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(settings["turns"]):
            answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools.offered)
            said = answer.choices[0].message
            if not said.tool_calls:
                return
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                content = await tools.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
