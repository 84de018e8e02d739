"""An agent that is a command of its own: data on its standard input, base URL and key in the environment, the reward as its last line.

--agent-command "python examples/agents/command_agent.py"
"""

import json
import sys

import calculator
from openai import OpenAI


def main() -> None:
    """Asks once, and scores the answer."""
    data = json.load(sys.stdin)
    with OpenAI(max_retries=8) as client:  # OPENAI_BASE_URL and OPENAI_API_KEY say where, and who asks
        completion = client.chat.completions.create(model=data["model"], messages=data["messages"])
    answer = completion.choices[0].message.content or ""
    print(f"answered {answer!r}", file=sys.stderr)
    print(json.dumps({"reward": float(calculator.is_right(answer, data["label"])), "length": len(answer)}))


if __name__ == "__main__":
    main()
