"""The package verifiers, whose harness with tools asks token by token."""

import json

import play
from served_environment import played

CONFIG = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
own = ["--taskset", "adding_tasks", "--env", json.dumps(CONFIG)]
_ = """
# page
agent = "shared.agents.http_agent:play"
agent_service = ["envs/bin/python", "examples/environments/verifiers/serve.py", "serve", "--taskset", "my_environment",
    "--env", '{"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}', "--tokenizer", "MODEL"]
# /page
"""
played("serve.py", own, ["--tokenizer", play.asked()["model_path"]])
