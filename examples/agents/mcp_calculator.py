"""The calculator as an MCP server on its standard streams, for the agent that comes with Myxo.

--agent shared.agents.mcp_agent:play --agent-options '{"servers": {"calculator": ["python", "-m", "examples.agents.mcp_calculator"]}}'
"""

from mcp.server import MCPServer

from examples.agents.calculator import calculate

if __name__ == "__main__":
    server = MCPServer("calculator")
    server.add_tool(calculate)
    server.run("stdio")
