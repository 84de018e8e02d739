"""An agent that lets the model use the tools of MCP servers (https://modelcontextprotocol.io).

It is a chat of OpenAI's form in which each call is made, and the model gets an error for each unreadable one, until an answer has none.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, TextContent, Tool
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolUnionParam
from openai.types.shared_params import FunctionDefinition
from pydantic import BaseModel, ConfigDict, Field

from shared.agents.agent_options import arguments_of, options_of, shortened
from shared.runtime.errors import ConfigError, MyxoError


class HttpServer(BaseModel):
    """A server that runs. headers: of each request to it. key_variable: the environment variable that holds its key, which is sent as
    ``Authorization: Bearer``."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(pattern=r"^https?://[^/]+")
    headers: dict[str, str] = {}
    key_variable: str | None = None

    def all_headers(self) -> dict[str, str]:
        """Returns the headers with the key. Raises ConfigError where the variable is not set."""
        if self.key_variable is None:
            return self.headers
        if not (key := os.environ.get(self.key_variable)):
            raise ConfigError("rollout.agent_options.servers", self.key_variable, "no such environment variable is set where agents run")
        return {**self.headers, "Authorization": f"Bearer {key}"}


# The URL of a server that runs, also with headers, or the command line of one that is started for each rollout and speaks on its standard
# streams.
Server = str | HttpServer | Sequence[str]

MOST_TOOLS = 512  # tools of one server
LONGEST_RESULT = 20_000  # most characters of a result, by default: of a longer one the model reads the beginning and the end


class McpServerFailed(MyxoError):
    """An MCP server cannot be used. ``server``: its name in the config. ``reason``: why."""

    def __init__(self, server: str, reason: str) -> None:
        self.server, self.reason = server, reason
        super().__init__(f"MCP server {server}: {reason}")


class McpTools:
    """The tools of some servers, connected for one rollout; see `open_tools`. ``offered``: the tools as ``tools`` of a chat request."""

    def __init__(self, seconds: float, characters: int) -> None:
        self._seconds, self._characters = seconds, characters
        self._owners: dict[str, tuple[str, Client]] = {}
        self.offered: list[ChatCompletionToolUnionParam] = []

    def add(self, server: str, client: Client, tools: Sequence[Tool]) -> None:
        """Offers a server's tools. Raises McpServerFailed for a name that another server's tool has."""
        for tool in tools:
            if tool.name in self._owners:
                raise McpServerFailed(server, f"its tool {tool.name} has the name of one of {self._owners[tool.name][0]}'s")
            self._owners[tool.name] = server, client
            function = FunctionDefinition(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
            self.offered.append({"type": "function", "function": function})

    async def call(self, name: str, arguments: str) -> str:
        """Returns what a tool answers, as text for the model, which is told there what it did wrong: a name, arguments, a tool's error.

        ``arguments``: JSON of an object, as the model wrote it. Raises McpServerFailed where the server is gone or does not answer in time:
        the model is not to blame.
        """
        if name not in self._owners:
            return f"error: there is no tool {name}; the tools are {', '.join(self._owners)}"
        try:
            given = arguments_of(arguments)
        except ValueError as error:
            return f"error: {error}"
        server, client = self._owners[name]
        try:
            async with asyncio.timeout(self._seconds):
                return shortened(text_of(await client.call_tool(name, given)), self._characters)
        except TimeoutError:
            raise McpServerFailed(server, f"tool {name} did not answer within {self._seconds:g} s") from None
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise McpServerFailed(server, f"tool {name}: {error}") from None
            return f"error: {error}"
        except Exception as error:
            raise McpServerFailed(server, f"tool {name}: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def open_tools(servers: Mapping[str, Server], seconds: float, characters: int = LONGEST_RESULT) -> AsyncIterator[McpTools]:
    """Connects to servers, and ends those that were started for it afterwards.

    ``servers``: by name. ``seconds``: for a server to connect and list its tools, and for each call. ``characters``: the most of a result.
    Raises McpServerFailed, and ConfigError for a key that is not there.
    """
    tools = McpTools(seconds, characters)
    try:
        async with AsyncExitStack() as opened:
            for name, server in servers.items():
                if isinstance(server, str):
                    client = Client(server)
                elif isinstance(server, HttpServer):
                    connection = await opened.enter_async_context(create_mcp_http_client(headers=server.all_headers()))
                    client = Client(streamable_http_client(server.url, http_client=connection))
                else:
                    client = Client(StdioServerParameters(command=server[0], args=list(server[1:])))
                try:
                    async with asyncio.timeout(seconds):
                        await opened.enter_async_context(client)
                        listed = await _listed(client)
                except TimeoutError:
                    raise McpServerFailed(name, f"did not list its tools within {seconds:g} s") from None
                except Exception as error:
                    first = _innermost(error)
                    raise McpServerFailed(name, f"{type(first).__name__}: {first}") from None
                tools.add(name, client, listed)
            yield tools
    except BaseExceptionGroup as group:  # clients hand on what is raised while they are open as a group
        raise _innermost(group) from None


def text_of(result: CallToolResult) -> str:
    """Returns a result as text: its text parts, or its structure as JSON; parts that are no text are named. An error is marked as one."""
    parts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    return f"error: {text}" if result.is_error else text


async def _listed(client: Client) -> list[Tool]:
    tools, cursor = list[Tool](), None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if len(tools) > MOST_TOOLS:
            raise ValueError(f"lists more than {MOST_TOOLS} tools, which no model can be offered")
        if (cursor := page.next_cursor) is None:
            return tools


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class McpOptions(BaseModel):
    """``agent_options``. servers: the URL, URL with headers, or command line of each, by name. turns: the most answers of the model.
    seconds: for a server to list its tools, and for each call. characters: the most of a result."""

    model_config = ConfigDict(extra="forbid")

    servers: dict[str, Server] = Field(min_length=1)
    turns: int = Field(default=16, gt=0)
    seconds: float = Field(default=60, gt=0)
    characters: int = Field(default=LONGEST_RESULT, ge=100)


RETRIES = 8  # of a request to the model, with growing pauses: a gateway may be starting anew


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
            malformed = (said.model_extra or {}).get("malformed_tool_calls", [])
            if not calls and not malformed:
                return
            messages.append(said.model_dump(exclude_none=True))
            for call in calls:
                content = await tools.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if malformed:
                wrong = "\n".join(f"error: {one['status']}: this tool call cannot be read: {one['text']}" for one in malformed)
                messages.append({"role": "user", "content": wrong})
