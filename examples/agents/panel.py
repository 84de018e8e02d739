"""Several agents on one problem: two solvers answer it, each for itself, and a judge who sees both answers gives the last one.

--agent examples.agents.panel:run

Each of the three is a conversation of its own, so that a rollout gives three samples. They share its reward: whoever helped to a right
answer is trained on it.
"""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from examples.agents.calculator import is_right
from examples.agents.openai_calculator import RETRIES

SOLVERS = 2


async def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Has the solvers answer at the same time, and then the judge."""
    problem = data["messages"][-1]["content"]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=RETRIES) as client:

        async def answer(messages: list[Any]) -> str:
            completion = await client.chat.completions.create(model=data["model"], messages=messages)
            return completion.choices[0].message.content or ""

        answers = await asyncio.gather(*(answer(data["messages"]) for _ in range(SOLVERS)))
        verdict = await answer([{"role": "user", "content": f"{' or '.join(answers)}? {problem}"}])
    right = [is_right(one, data["label"]) for one in (*answers, verdict)]
    return {"reward": float(right[-1]), "solved": sum(right[:-1]) / SOLVERS}
