"""A reward function and an agent that ask a run's frozen model, called judge, and keep what it answered.

A line of the file of the variable `ANSWERS` is an answer: who asked, and the judge's log-prob of the same few tokens each time.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import openai

from shared.hooks import Arguments, HookSample
from shared.hooks.slime.rollout_loop import get_model_url

ANSWERS = "JUDGE_ANSWERS"
ASKED = [5, 6, 7, 8, 9, 10]
LONGEST = aiohttp.ClientTimeout(total=300)


def note(asker: str, **answer: Any) -> None:
    with Path(os.environ[ANSWERS]).open("a") as file:
        file.write(json.dumps({"asker": asker, **answer}) + "\n")


async def judged(args: Arguments, sample: HookSample, **_: Any) -> float:
    """Returns 1 for half of all answers, whichever; the judge is asked by its own address."""
    asked = {
        "input_ids": ASKED,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with aiohttp.ClientSession(timeout=LONGEST) as session, session.post(get_model_url(args, "judge"), json=asked) as response:
        response.raise_for_status()
        found = (await response.json())["meta_info"]
    log_probs = [entry[0] for entry in found["input_token_logprobs"][1:]]
    note("reward", log_prob=sum(log_probs), names=sorted(args.sglang_model_routers))
    return float(zlib.crc32(sample.response.encode()) % 2)


async def advised(data: dict[str, Any], base_url: str, api_key: str) -> None:
    """An agent that has the judge comment on the policy's answer; the run's reward function scores it."""
    async with openai.AsyncOpenAI(base_url=f"{base_url.removesuffix('/v1')}/v1", api_key=api_key, timeout=300) as client:
        question = [{"role": "user", "content": data["prompt"]}]
        answer = await client.chat.completions.create(model="policy", messages=question)  # type: ignore[call-overload]
        asked = [
            *question,
            {"role": "assistant", "content": answer.choices[0].message.content or "."},
            {"role": "user", "content": "Good?"},
        ]
        comment = await client.chat.completions.create(model="judge", messages=asked, temperature=0, max_tokens=9)
        whole, streamed = "", await client.chat.completions.create(model="judge", messages=asked, temperature=0, max_tokens=9, stream=True)
        async for part in streamed:
            whole += (part.choices[0].delta.content or "") if part.choices else ""
        served = [model.id async for model in client.models.list()]
        try:
            await client.chat.completions.create(model="jugde", messages=question)
        except openai.NotFoundError as error:
            refusal = str(error)
        note("agent", model=comment.model, alike=whole == comment.choices[0].message.content, served=served, refusal=refusal)
