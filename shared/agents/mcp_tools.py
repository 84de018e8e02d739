"""The tools of MCP servers (https://modelcontextprotocol.io), as a chat of OpenAI's form offers and calls them."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, TextContent, Tool
from openai.types.chat import ChatCompletionToolUnionParam
from openai.types.shared_params import FunctionDefinition
from pydantic import BaseModel, ConfigDict, Field

from shared.agents.tool_calls import arguments_of, shortened
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


Server = str | HttpServer | Sequence[str]
"""The URL of a server that runs, also with headers, or the command line of one that is started for each rollout and speaks on its standard
streams."""

MOST_TOOLS = 512
"""Tools of one server."""

LONGEST_RESULT = 20_000
"""The most characters of a result, by default: of a longer one the model reads the beginning and the end."""


class McpServerFailed(MyxoError):
    """An MCP server cannot be used. ``server``: its name in the config. ``reason``: why."""

    def __init__(self, server: str, reason: str) -> None:
        self.server, self.reason = server, reason
        super().__init__(f"MCP server {server}: {reason}")


class McpTools:
    """The tools of some servers, connected for one rollout; see `open_tools`.

    Attributes:
        offered: the tools as ``tools`` of a chat request.
    """

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

        Args:
            arguments: JSON of an object, as the model wrote it.

        Raises McpServerFailed where the server is gone or does not answer in time: the model is not to blame.
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

    Args:
        servers: by name. seconds: for a server to connect and list its tools, and for each call. characters: the most of a result.

    Raises McpServerFailed, and ConfigError for a key that is not there.
    """
    tools = McpTools(seconds, characters)
    try:
        async with AsyncExitStack() as opened:
            for name, server in servers.items():
                await _connect(name, server, tools, opened, seconds)
            yield tools
    except BaseExceptionGroup as group:  # clients hand on what is raised while they are open as a group
        raise _innermost(group) from None


def text_of(result: CallToolResult) -> str:
    """Returns a result as text: its text parts, or its structure as JSON; parts that are no text are named. An error is told as one."""
    parts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    return f"error: {text}" if result.is_error else text


async def _connect(name: str, server: Server, tools: McpTools, opened: AsyncExitStack, seconds: float) -> None:
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
    """Returns an error; of a group of errors the first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
