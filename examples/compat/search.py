"""A question, a search, and an answer: generate and reward function in slime's manner.

    --custom-generate-function-path examples.compat.search.generate
    --custom-rm-path examples.compat.search.reward_func

The model asks by ``<search>words</search>`` and answers by ``<answer>text</answer>``. The server at SEARCH_URL takes ``{"queries": [text],
"topk": n}`` and gives ``{"result": [[{"document": {"contents": text}}, …]]}``.
"""

import asyncio
import os
import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

CONFIG = {"max_turns": 3, "topk": 2, "at_once": 64}

LIMIT = asyncio.Semaphore(CONFIG["at_once"])


async def search(words):
    async with LIMIT:
        found = await post(os.environ["SEARCH_URL"], {"queries": [words], "topk": CONFIG["topk"]})
    texts = [entry["document"]["contents"] for entry in found["result"][0]]
    return "\n".join(f"({number}) {text}" for number, text in enumerate(texts, 1))


def action_of(text):
    match = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    return (match.group(1), match.group(2).strip()) if match else (None, "")


async def observation(text):
    action, content = action_of(text)
    if action == "answer":
        return None
    if action == "search":
        return f"\n<information>{await search(content)}</information>\n"
    return "\nSay <search>words</search> or <answer>text</answer>.\n"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "a search begins anew"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

    prompt = sample.prompt + f"\n<information>{await search(sample.prompt)}</information>\n"
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    sample.response, sample.response_length = "", 0
    sample.loss_mask, sample.rollout_log_probs = [], []
    sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None
    loss_mask = sample.loss_mask
    searches = 0

    stops = [*(sampling_params.get("stop") or []), "</search>", "</answer>"]
    for _ in range(CONFIG["max_turns"]):
        payload = {"input_ids": sample.tokens, "sampling_params": {**sampling_params, "stop": stops}, "return_logprob": True}
        output = await post(url, payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        generated = meta["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[entry[1] for entry in generated], log_probs=[entry[0] for entry in generated], meta_info=meta, text=output["text"]
        )
        if meta["finish_reason"]["type"] == "length":
            break
        seen = await observation(output["text"])
        if seen is None:
            break
        searches += "<information>" in seen
        ids = state.tokenizer(seen, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=seen)

    assert len(loss_mask) == sample.response_length
    sample.prompt = prompt
    sample.searches = searches
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("expected a Sample")
    action, content = action_of(sample.response)
    right = action == "answer" and content == str(sample.label)
    return float(right) + 0.1 * sample.searches
