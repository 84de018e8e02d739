"""An agent of the package strands-agents as a command, from a virtual environment of its own.

--agent-command "envs/bin/python examples/agents/strands_agent.py"
"""

import json
import os
import sys

import calculator
from strands import Agent, tool
from strands.models.openai import OpenAIModel


def main() -> None:
    """Has the agent answer, with a calculator, and scores what it says last."""
    data = json.load(sys.stdin)
    where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "max_retries": 8}
    calculate = tool(name=calculator.NAME, description=calculator.DESCRIPTION)(calculator.calculate)
    agent = Agent(OpenAIModel(client_args=where, model_id=data["model"]), tools=[calculate], callback_handler=None)
    answer = str(agent("\n".join(message["content"] for message in data["messages"])))
    turns = sum(message["role"] == "assistant" for message in agent.messages)
    print(json.dumps(calculator.reward(turns, calculator.is_right(answer, data["label"]))))


if __name__ == "__main__":
    main()
