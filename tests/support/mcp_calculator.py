"""An MCP server with a calculator: on its standard streams, by HTTP at the port that is its only argument, or with ``many`` other tools."""

import asyncio
import os
import sys

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    """Divides."""
    return a / b


@server.tool()
async def wait(seconds: float) -> str:
    """Answers later."""
    await asyncio.sleep(seconds)
    return "now"


@server.tool()
def recite(length: int) -> str:
    """Answers at length."""
    return "x" * length


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:] == ["many"]:
        for number in range(1000):
            server.add_tool(lambda: "", name=f"tool{number}")
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
