"""The agent of the crowd: `openai`'s client, as the agents' page has it, with as many turns and tokens as its options say."""

import random
import string
from typing import Any

import httpx
from openai import AsyncOpenAI

RETRIES = 40
"""The client waits as the answer's Retry-After says, half a second at least."""


async def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Plays one session. Returns its turns, how often it was refused, and how often without being told when to come back."""
    refused, told_nothing = 0, 0

    async def note(response: httpx.Response) -> None:
        nonlocal refused, told_nothing
        if response.status_code >= 400:
            refused += 1
            told_nothing += "retry-after" not in response.headers

    options, messages = data["options"], list(data["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=RETRIES) as client:
        client._client.event_hooks = {"response": [note]}
        for _ in range(options["turns"]):
            completion = await client.chat.completions.create(model=data["model"], messages=messages)
            messages.append(completion.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "".join(random.choices(string.ascii_letters, k=options["further"]))})
    return {"reward": 1.0, "turns": float(options["turns"]), "refused": float(refused), "told_nothing": float(told_nothing)}
