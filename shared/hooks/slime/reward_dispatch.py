"""``slime.rollout.rm_hub``: rewards by name for code of the user's that scores by itself while it generates."""

import asyncio
import functools
import random
from typing import Any

import numpy as np

from shared.config.reward_section import CUSTOM, JUDGE, OWN, TOURNAMENT, WEIGHTED
from shared.hooks import reward_values
from shared.hooks.hook_sample import HookSample
from shared.hooks.loading import load_function
from shared.hooks.slime import http_requests, model_functions
from shared.rewards.boxed_math import extract_answer as extract_boxed_answer
from shared.rewards.boxed_math import get_deepscaler_rule_based_reward, grade_answer_verl
from shared.rewards.names import QUEUES, RUNS_CODE, VERIFIERS, base, pattern_of
from shared.rewards.reference import Reference, label_text
from shared.rewards.text_rewards import compute_gpqa_reward, f1_score
from shared.rewards.text_rewards import compute_score as compute_score_dapo
from shared.rewards.verifiers import pattern_answer, verify
from shared.runtime.tasks import gathered, settled
from shared.schema.sample import ScoredText, sampled, scored_text, turns_of

REMOTE_TRIES = 10

ELSEWHERE = (OWN, JUDGE, TOURNAMENT, *RUNS_CODE)
"""Rewards that the reward service alone can ask for, besides the environments that the run names: it has the connections, the keys and the
sandboxes."""

__all__ = [
    "async_rm", "batched_async_rm", "compute_gpqa_reward", "compute_score_dapo", "extract_boxed_answer", "f1_score",
    "get_deepscaler_rule_based_reward", "grade_answer_verl", "remote_rm",
]  # fmt: skip


async def async_rm(args: Any, sample: HookSample, **more: Any) -> Any:
    """Returns the reward of a sample: by its own function, the run's (unless that is weighted), or what ``metadata["rm_type"]`` or
    ``args.rm_type`` names.

    Of ``weighted`` it is a dict: ``reward``, the sum, and each part by its name. Raises NotImplementedError for a name that is none, or
    that the reward service alone can ask (`scored_later`), ValueError for a label that cannot be compared with.
    """
    if (path := sample.custom_rm_path or _replacing(args)) is not None:
        return await settled(load_function(path)(args, sample, **more))
    return await _named(args, sample, rm_name(args, sample))


def _replacing(args: Any) -> str | None:
    """Returns the run's function where it scores in place of everything else."""
    path: str | None = args.custom_rm_path
    return path if path and args.rm_type != WEIGHTED else None


def rm_name(args: Any, sample: HookSample) -> str:
    """Returns the name of what scores a sample where no function does."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return str(metadata.get("rm_type") or args.rm_type or "").strip()


def scored_later(args: Any, sample: HookSample) -> bool:
    """Returns whether only the reward service can score a sample, as it does with each that is handed in without a reward."""
    if sample.custom_rm_path or _replacing(args):
        return False
    there = {*ELSEWHERE, *getattr(args, "environments", {})}
    name = rm_name(args, sample)
    names = args.reward_weights if name == WEIGHTED else (name,)
    return not there.isdisjoint(map(base, names))


def _response(args: Any, sample: HookSample) -> str:
    """Returns what ``args.scored_text`` has scored; all of a response of which it is not known which tokens the model sampled."""
    which: ScoredText = getattr(args, "scored_text", "full")
    mask, turns = sample.loss_mask, getattr(sample, "turns", [])
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):  # a function's own attribute
        turns = []
    if which != "full" and not turns and mask is not None and len(mask) == sample.response_length:
        log_probs = None if sample.rollout_log_probs is None else np.asarray(sample.rollout_log_probs, np.float64)
        response = np.asarray(sample.tokens[len(sample.tokens) - len(mask) :])
        turns = turns_of(sampled(np.asarray(mask), log_probs), response, lambda ids: _decoded(args, ids, sample.response))
    return scored_text(sample.response, turns, which)


def _decoded(args: Any, ids: Any, text: str) -> str:
    """Returns the text of tokens of a response, without special tokens where ``text``, the whole response's, has none."""
    tokenizer = _tokenizer(args.hf_checkpoint, bool(getattr(args, "trust_remote_code", False)))
    skip = bool(args.rollout_skip_special_tokens) or not any(token in text for token in tokenizer.all_special_tokens)
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=skip))


@functools.cache
def _tokenizer(model: str, trusted: bool) -> Any:
    return model_functions.load_tokenizer(model, trust_remote_code=trusted)


async def _named(args: Any, sample: HookSample, name: str) -> Any:
    if name == "remote_rm":
        return await remote_rm(args, sample)
    if name == CUSTOM and args.custom_rm_path and not getattr(args, "group_rm", False):
        return await settled(load_function(args.custom_rm_path)(args, sample))
    if name == WEIGHTED:
        rewards = await gathered(_named(args, sample, name) for name in args.reward_weights)
        parts = {
            name: reward_values.read(reward, "score" if name.endswith("dapo") else None).reward
            for name, reward in zip(args.reward_weights, rewards, strict=True)
        }
        return {"reward": sum(weight * parts[name] for name, weight in args.reward_weights.items()), **parts}
    response = _response(args, sample)
    if (pattern := pattern_of(args, name)) is not None:
        response = pattern_answer(response, pattern)
    if name not in VERIFIERS or base(name) in RUNS_CODE:
        there = f"there are {', '.join(sorted({*QUEUES}.difference(RUNS_CODE)))}, remote_rm and {WEIGHTED}"
        raise NotImplementedError(f"no reward is named {name!r} outside of the reward service; {there}, or leave sample.reward to it")
    try:
        reference = Reference(*label_text(sample.label), sample.metadata if isinstance(sample.metadata, dict) else {})
    except TypeError as error:
        raise ValueError(f"the label is no JSON: {error}") from None
    return await asyncio.to_thread(verify, name, response, reference)


async def batched_async_rm(args: Any, samples: list[Any], **more: Any) -> list[Any]:
    """Returns the rewards of samples: by the run's function at once, else of each by itself."""
    if (path := _replacing(args)) is not None:
        return list(await settled(load_function(path)(args, samples, **more)))
    return await gathered(async_rm(args, sample, **more) for sample in samples)


async def remote_rm(args: Any, sample: HookSample, max_retries: int = REMOTE_TRIES) -> Any:
    """Returns what the server at ``args.rm_url`` answers to a prompt, its response and its label."""
    body = {"prompt": sample.prompt, "response": _response(args, sample), "label": sample.label}
    for attempt in range(max_retries):
        try:
            return await http_requests.post(args.rm_url, body, max_retries=1)
        except Exception:
            if attempt + 1 >= max_retries:
                raise
            await asyncio.sleep(min(2**attempt, 30) + random.random())
    raise ValueError(f"max_retries is {max_retries}; expected at least 1")
