"""A coding agent: the model writes and edits files in a sandbox and runs tests there, until they pass or its turns are over.

--agent examples.coding.coding_agent:run

The label of a prompt holds its tests, as for rm_type = unit_tests. The reward is the share of tests that ``solution.py`` passes in the end.
"""

from typing import Any

from openai import AsyncOpenAI

from shared.rewards.unit_test_cases import cases_of
from shared.sandbox.coding_tools import SOLUTION, TOOLS, CodingTools
from shared.sandbox.program import SandboxLimits, SandboxSettings

TURNS = 8
RETRIES = 8
"""How often the client repeats a request while a gateway is away, or has no room."""

SYSTEM = f"Solve the task in Python, in the file {SOLUTION}. Use the tools; say that you are done once the tests pass."

SETTINGS = SandboxSettings(limits=SandboxLimits(wall_s=20.0, cpu_s=5.0, processes=32, output_bytes=64 << 10), lease_s=600.0)
"""The sandbox of a rollout. Its lease is longer than the model takes for a turn; nobody has to end what a killed agent leaves."""


async def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Has the model work with the tools. Returns the reward, and in how many turns it came."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, *data["messages"]]
    async with (
        AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=RETRIES) as client,
        CodingTools(SETTINGS, cases_of(data["label"])) as tools,
    ):
        for turn in range(1, TURNS + 1):  # noqa: B007 (it is told below)
            completion = await client.chat.completions.create(model=data["model"], messages=messages, tools=TOOLS)  # type: ignore[arg-type]
            answer = completion.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                content = await tools.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        passed = await tools.passed()
    return {"reward": passed, "solved": float(passed == 1.0), "turns": float(turn)}
