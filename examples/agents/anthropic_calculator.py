"""The same agent over Anthropic's SDK.

--agent examples.agents.anthropic_calculator:run
"""

from typing import Any

from anthropic import AsyncAnthropic

from examples.agents.calculator import AGAIN, DESCRIPTION, NAME, PARAMETERS, TURNS, calculate, is_right, reward
from examples.agents.openai_calculator import RETRIES

TOOLS: Any = [{"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}]

MAX_TOKENS = 4096
"""Anthropic's requests have to say how many; the run's own limit holds where it is lower."""


async def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Has the model answer, with its calls of the calculator answered, and shows it where it is wrong."""
    messages = list(data["messages"])
    root = base_url.removesuffix("/v1")  # this SDK appends it
    async with AsyncAnthropic(base_url=root, api_key=api_key, max_retries=RETRIES) as client:
        for turn in range(1, TURNS + 1):
            answer = await client.messages.create(model=data["model"], messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS)
            messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
            calls = [block for block in answer.content if block.type == "tool_use"]
            text = "".join(block.text for block in answer.content if block.type == "text")
            if calls:
                results = [{"type": "tool_result", "tool_use_id": call.id, "content": called(call.input)} for call in calls]
                messages.append({"role": "user", "content": results})
            elif is_right(text, data["label"]):
                return reward(turn, right=True)
            else:
                messages.append({"role": "user", "content": f"{AGAIN}{data['messages'][-1]['content']}"})
    return reward(TURNS, right=False)


def called(arguments: Any) -> str:
    """The tool's answer to a call, whose arguments are an object."""
    expression = arguments.get("expression")
    return calculate(expression) if isinstance(expression, str) else "error: expected an expression"
