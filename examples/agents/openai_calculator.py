"""An agent over OpenAI's SDK: three turns at most, with a calculator. Nothing in it knows of Myxo.

--agent examples.agents.openai_calculator:run
"""

import json
from typing import Any

from openai import AsyncOpenAI

from examples.agents.calculator import AGAIN, DESCRIPTION, NAME, PARAMETERS, TURNS, calculate, is_right, reward

TOOLS: Any = [{"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}}]

RETRIES = 8
"""How often the client repeats a request while a gateway is away, or has no room."""


async def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Has the model answer, with its calls of the calculator answered, and shows it where it is wrong."""
    messages = list(data["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=RETRIES) as client:
        for turn in range(1, TURNS + 1):
            completion = await client.chat.completions.create(model=data["model"], messages=messages, tools=TOOLS)
            answer = completion.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))  # as it came: then the next turn carries its very tokens on
            if answer.tool_calls:
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": called(call.function.arguments)} for call in answer.tool_calls
                ]
            elif is_right(answer.content or "", data["label"]):
                return reward(turn, right=True)
            else:
                messages.append({"role": "user", "content": f"{AGAIN}{data['messages'][-1]['content']}"})
    return reward(TURNS, right=False)


def called(arguments: str) -> str:
    """The tool's answer to a call, whose arguments are JSON text."""
    expression = json.loads(arguments).get("expression")
    return calculate(expression) if isinstance(expression, str) else "error: expected an expression"
