"""The package verifiers 0.1, whose environments are clients of chat completions."""

from served_environment import played

_ = """
# page
agent = "shared.agents.http_agent:play"
agent_service = ["envs/bin/python", "examples/environments/verifiers/serve_older.py", "serve", "--environment", "my_environment"]
# /page
"""
played("serve_older.py", ["--environment", "adding_older"])
played("serve_older.py", ["--environment", "adding_older"], ["--sampling", '{"tool_choice": "required"}'], features=("required",))
