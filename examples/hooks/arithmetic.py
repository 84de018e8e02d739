"""Functions of one's own for the quick start's sums: generating in two turns, scoring, filtering, looking on.

Each is named by a flag; the README of this directory has the command.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import aiohttp

from shared.data.tokenizer import Tokenizer
from shared.hooks import Arguments, DynamicFilterOutput, Sample

AGAIN = " no. "
"""Feedback on a wrong answer, before the problem is repeated."""


def answer(text: str) -> str | None:
    """The last number of a text."""
    numbers = re.findall(r"\d+", text)
    return numbers[-1] if numbers else None


async def second_try(args: Arguments, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path``: after a wrong answer the model may try again. Both answers are trained, the words are not."""
    await turn(args, sample, sampling_params)
    if sample.status is not Sample.Status.ABORTED and answer(sample.response) != sample.label:
        words = f"{AGAIN}{sample.prompt}"
        sample.append_response_tokens(tokens=tokenizer(args.hf_checkpoint).encode(words), trainable=False, text=words)
        await turn(args, sample, sampling_params)
        sample.metadata["tries"] = 2
    return sample


async def turn(args: Arguments, sample: Sample, sampling_params: dict[str, Any]) -> None:
    """One answer of this replica's engine behind the tokens that are there."""
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.post(url, json=body) as response:
        output = await response.json()
    meta = output["meta_info"]
    generated = meta.get("output_token_logprobs") or []  # [log-prob, id, None] each
    sample.append_response_tokens(
        tokens=[token for _, token, _ in generated],
        log_probs=[log_prob for log_prob, _, _ in generated],
        meta_info=meta,
        text=tokenizer(args.hf_checkpoint).decode([token for _, token, _ in generated]),
    )


async def score(args: Arguments, sample: Sample, **_: Any) -> dict[str, float]:
    """``--custom-rm-path``: 1 for a right answer, a tenth less where it took two tries; ``right`` stands beside it."""
    right = answer(sample.response) == sample.label
    return {"reward": right - 0.1 * (sample.metadata.get("tries", 1) - 1), "right": float(right)}


def mixed(args: Arguments, group: list[Sample], **_: Any) -> DynamicFilterOutput:
    """``--dynamic-sampling-filter-path``: only groups in which some are right and some are wrong."""
    right = sum(sample.reward["right"] for sample in group if isinstance(sample.reward, dict))
    if 0 < right < len(group):
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, "all_right" if right else "all_wrong")


def without_truncated(args: Arguments, groups: list[list[Sample]]) -> None:
    """``--rollout-sample-filter-path``: answers that were cut off are not trained; their rewards still count in the group."""
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.status is Sample.Status.TRUNCATED


def write_down(args: Arguments, all_groups: list[list[Sample]], data_source: None) -> None:
    """``--rollout-all-samples-process-path``: a line for each group, kept or not, in ``groups.jsonl`` of the run's directory."""
    directory = Path(args.dir) / args.name
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "groups.jsonl").open("a") as file:
        for group in all_groups:
            rewards = [sample.get_reward_value(args) for sample in group]
            file.write(json.dumps({"prompt": group[0].prompt, "rewards": rewards}) + "\n")


@functools.cache
def tokenizer(model: str) -> Tokenizer:
    return Tokenizer(Path(model))
