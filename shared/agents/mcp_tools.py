"""The tools of MCP servers (https://modelcontextprotocol.io), as a chat of OpenAI's form offers and calls them."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from mcp import Client, MCPError, StdioServerParameters
from mcp.types import CONNECTION_CLOSED, CallToolResult, TextContent, Tool
from openai.types.chat import ChatCompletionToolUnionParam
from openai.types.shared_params import FunctionDefinition

from shared.runtime.errors import MyxoError

Server = str | Sequence[str]
"""The URL of a server that runs, or the command line of one that is started for each rollout and speaks on its standard streams."""

MOST_TOOLS = 512
"""Tools of one server."""


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

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
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
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are no JSON: {error}"
        if not isinstance(given, dict):
            return "error: the arguments must be a JSON object"
        server, client = self._owners[name]
        try:
            async with asyncio.timeout(self._seconds):
                return text_of(await client.call_tool(name, given))
        except TimeoutError:
            raise McpServerFailed(server, f"tool {name} did not answer within {self._seconds:g} s") from None
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise McpServerFailed(server, f"tool {name}: {error}") from None
            return f"error: {error}"
        except Exception as error:
            raise McpServerFailed(server, f"tool {name}: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def open_tools(servers: Mapping[str, Server], seconds: float) -> AsyncIterator[McpTools]:
    """Connects to servers, and ends those that were started for it afterwards.

    Args:
        servers: by name. seconds: for a server to connect and list its tools, and for each call.

    Raises McpServerFailed.
    """
    tools = McpTools(seconds)
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
    client = Client(server if isinstance(server, str) else StdioServerParameters(command=server[0], args=list(server[1:])))
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
    while len(tools) < MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return tools[:MOST_TOOLS]


def _innermost(error: BaseException) -> BaseException:
    """Returns an error; of a group of errors the first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
