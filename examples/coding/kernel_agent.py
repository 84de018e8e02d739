"""An agent that optimises a kernel: it is written, compiled and measured, and the model gets the result back, turn after turn.

--agent examples.coding.kernel_agent:run

The label of a prompt names the kernel (`examples.coding.kernels.REFERENCES`). The reward is that of the best of its tries.
"""

import asyncio
import re
from typing import Any

from openai import AsyncOpenAI

from examples.coding.coding_agent import RETRIES
from examples.coding.kernels import KernelBench, has_gpu

TURNS = 4
NO_CODE = "There is no code block with a kernel in that. Answer with the whole file."

_BLOCK = re.compile(r"^```[ \t]*(\w+)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


async def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Has the model write a kernel, and again with what was measured. Returns the best reward, and its speed-up."""
    bench = await asyncio.to_thread(KernelBench, data["label"], has_gpu())
    messages: list[Any] = [*data["messages"], {"role": "user", "content": bench.task}]
    best = {"reward": 0.0, "compiled": 0.0, "correct": 0.0, "speedup": 0.0}
    try:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=RETRIES) as client:
            for _ in range(TURNS):
                completion = await client.chat.completions.create(model=data["model"], messages=messages)
                answer = completion.choices[0].message
                source = last_block(answer.content or "", bench.languages)
                feedback = NO_CODE
                if source is not None:
                    found = await asyncio.to_thread(bench.measure, source)
                    feedback = found.feedback
                    figures = {"compiled": float(found.compiled), "correct": float(found.correct), "speedup": found.speedup}
                    best = max(best, {"reward": found.reward, **figures}, key=lambda figures: figures["reward"])
                messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": feedback}]
    finally:
        await asyncio.to_thread(bench.close)
    return best


def last_block(text: str, languages: tuple[str, ...]) -> str | None:
    """Returns the last fenced block of one of these languages."""
    found = [code for language, code in _BLOCK.findall(text) if language.lower() in languages]
    return found[-1] if found else None
