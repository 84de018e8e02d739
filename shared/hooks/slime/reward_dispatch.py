"""``slime.rollout.rm_hub``: rewards by name for code of the user's that scores by itself while it generates."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from shared.hooks.hook_sample import HookSample
from shared.hooks.slime import http_requests
from shared.hooks.slime.function_loading import load_function
from shared.rewards.boxed import extract_answer as extract_boxed_answer
from shared.rewards.boxed_math import get_deepscaler_rule_based_reward, grade_answer_verl
from shared.rewards.dapo import compute_score as compute_score_dapo
from shared.rewards.f1 import f1_score
from shared.rewards.gpqa import compute_gpqa_reward
from shared.rewards.ifbench import compute_ifbench_reward
from shared.rewards.names import BOXED

REMOTE_TRIES = 10

_BY_NAME: dict[str, Callable[[str, Any, dict[str, Any]], Any]] = {
    "deepscaler": lambda response, label, _: get_deepscaler_rule_based_reward(response, label),
    "dapo": lambda response, label, _: compute_score_dapo(response, label),
    "math": lambda response, label, _: int(grade_answer_verl(response, label)),
    "f1": lambda response, label, _: f1_score(response, label)[0],
    "gpqa": lambda response, label, metadata: compute_gpqa_reward(response, label, metadata),
    "ifbench": lambda response, label, metadata: compute_ifbench_reward(response, label, metadata),
    "random": lambda *_: random.randint(0, 1),
}
"""Reward functions of response, label and metadata."""

__all__ = [
    "async_rm", "batched_async_rm", "compute_gpqa_reward", "compute_score_dapo", "extract_boxed_answer", "f1_score",
    "get_deepscaler_rule_based_reward", "grade_answer_verl", "remote_rm",
]  # fmt: skip


async def async_rm(args: Any, sample: HookSample, **more: Any) -> Any:
    """Returns the reward of a sample: by its own function, the run's, or what ``metadata["rm_type"]`` or ``args.rm_type`` names.

    Raises NotImplementedError for a name that is none.
    """
    if (path := sample.custom_rm_path or args.custom_rm_path) is not None:
        return await load_function(path)(args, sample, **more)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    name = (metadata.get("rm_type") or args.rm_type or "").strip()
    if name == "remote_rm":
        return await remote_rm(args, sample)
    response = extract_boxed_answer(sample.response) or "" if name.startswith(BOXED) else sample.response
    scored = _BY_NAME.get(name.removeprefix(BOXED))
    if scored is None:
        there = f"there are {', '.join(_BY_NAME)} and remote_rm"
        raise NotImplementedError(f"no reward is named {name!r} outside of the reward service; {there}, or leave sample.reward to it")
    return await asyncio.to_thread(scored, response, sample.label, metadata)


async def batched_async_rm(args: Any, samples: list[Any], **more: Any) -> list[Any]:
    """Returns the rewards of samples: by the run's function at once, else of each by itself."""
    if args.custom_rm_path is not None:
        rewards: list[Any] = await load_function(args.custom_rm_path)(args, samples, **more)
        return rewards
    return list(await asyncio.gather(*(async_rm(args, sample, **more) for sample in samples)))


async def remote_rm(args: Any, sample: HookSample, max_retries: int = REMOTE_TRIES) -> Any:
    """Returns what the server at ``args.rm_url`` answers to a prompt, its response and its label."""
    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    for attempt in range(max_retries):
        try:
            return await http_requests.post(args.rm_url, body, max_retries=1)
        except Exception:
            if attempt + 1 >= max_retries:
                raise
            await asyncio.sleep(min(2**attempt, 30) + random.random())
    raise ValueError(f"max_retries is {max_retries}; expected at least 1")
