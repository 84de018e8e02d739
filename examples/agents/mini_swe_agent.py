"""The package mini-swe-agent as a command, from a virtual environment of its own. What the model writes runs in a shell beside it: in a
container (`agent_image`), or on a machine that has nothing else.

--agent-command "envs/bin/python examples/agents/mini_swe_agent.py"
"""

import json
import os
import sys
import tempfile

os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "true"}

import calculator
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

STEPS = 20
"""The most answers of the model."""


def main() -> None:
    """Has the agent work in a directory of its own, and scores what it hands in."""
    data = json.load(sys.stdin)
    config = get_config_from_spec("mini.yaml")
    settings = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    model = LitellmModel(**{**config["model"], "model_name": f"openai/{data['model']}"})  # OPENAI_BASE_URL and OPENAI_API_KEY say where
    with tempfile.TemporaryDirectory() as directory:
        environment = LocalEnvironment(cwd=directory, **config["environment"])
        agent = DefaultAgent(model, environment, step_limit=STEPS, **settings)
        handed_in = agent.run("\n".join(message["content"] for message in data["messages"]))["submission"]
    print(json.dumps(calculator.reward(agent.n_calls, calculator.is_right(handed_in, data["label"]))))


if __name__ == "__main__":
    main()
