"""An agent that lets the model use the tools of MCP servers: a chat in which each call is made, until an answer has none."""

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from shared.agents.agent_options import options_of
from shared.agents.mcp_tools import LONGEST_RESULT, Server, open_tools


class McpOptions(BaseModel):
    """``agent_options``. servers: the URL, URL with headers, or command line of each, by name. turns: the most answers of the model.
    seconds: for a server to list its tools, and for each call. characters: the most of a result."""

    model_config = ConfigDict(extra="forbid")

    servers: dict[str, Server] = Field(min_length=1)
    turns: int = Field(default=16, gt=0)
    seconds: float = Field(default=60, gt=0)
    characters: int = Field(default=LONGEST_RESULT, ge=100)


RETRIES = 8
"""Of a request to the model, with growing pauses: a gateway may be starting anew."""


async def play(data: Mapping[str, Any], base_url: str, api_key: str) -> None:
    """Plays one rollout; the run's reward scores it. An agent of the user's may call it, and give a reward of its own.

    Raises ConfigError for options that are wrong, McpServerFailed, and openai's errors.
    """
    options, messages = options_of(data, McpOptions), [*data["messages"]]
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=RETRIES)
    async with open_tools(options.servers, options.seconds, options.characters) as tools, client:
        for _ in range(options.turns):
            answer = await client.chat.completions.create(model=data["model"], messages=messages, tools=tools.offered)
            said = answer.choices[0].message
            calls = [call for call in said.tool_calls or () if call.type == "function"]
            if not calls:
                return
            messages.append(said.model_dump(exclude_none=True))
            for call in calls:
                content = await tools.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
