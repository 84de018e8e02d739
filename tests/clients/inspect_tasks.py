"""The package inspect-ai: its tasks as an agent that is a command."""

import json
import os
import subprocess
import sys
from pathlib import Path

from play import ASK, calls, play

HERE = Path(__file__).parent
AGENT = HERE.parents[1] / "examples" / "environments" / "inspect" / "task_agent.py"
_ = """
# page
[[eval.sets]]
name = "my_task"
path = "my_task.jsonl"
agent_command = ["envs/bin/python", "examples/environments/inspect/task_agent.py", "play", "--task", "my_package:my_task"]
# /page
"""


def played(name):
    def run(base_url, api_key, model):
        environment = {**os.environ, "PYTHONPATH": str(HERE), "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        own = ["--task", "inspect_features:feature", "--arguments", json.dumps({"name": name})]
        own += ["--model-arguments", '{"stream": true}'] if name == "stream" else []
        command = [sys.executable, str(AGENT)]
        rows = subprocess.run([*command, "tasks", *own], env=environment, check=True, capture_output=True, text=True).stdout
        [row] = map(json.loads, rows.splitlines())
        assert row["prompt"] == ASK[name]
        data = json.dumps({**row, "model": model})
        done = subprocess.run([*command, "play", *own], env=environment, input=data, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
        *_, shown, reward = done.stdout.splitlines()
        assert json.loads(reward) == {"right": 1.0, "reward": 1.0}
        calls.extend(json.loads(shown)["calls"])
        return json.loads(shown)["said"]

    return run


play({name: played(name) for name in ASK})
