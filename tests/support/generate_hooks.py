"""Functions for ``rollout.custom_generate_function_path``: good ones, and ones that misbehave."""

import asyncio
import threading
import time
from typing import Any

import aiohttp

from shared.hooks import Arguments, HookSample, Status

TOOL = [20, 21, 22]
"""What a tool answers, as tokens."""

FIRST_TURN, SECOND_TURN = 5, 7
"""Tokens of each."""

between, go_on = threading.Event(), threading.Event()
"""A function is between its turns; it may go on."""

calls: list[HookSample] = []
"""What `recorded` and those that fail were called with."""


async def ask(args: Arguments, sample: HookSample, sampling_params: dict[str, Any], count: int) -> dict[str, Any]:
    """The engine's answer behind the sample's tokens: exactly ``count`` tokens."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    parameters = {**sampling_params, "max_new_tokens": count, "ignore_eos": True, "stop_token_ids": []}
    body = {"input_ids": sample.tokens, "sampling_params": parameters, "return_logprob": True}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        answer.raise_for_status()
        return await answer.json()  # type: ignore[no-any-return]


async def turn(args: Arguments, sample: HookSample, sampling_params: dict[str, Any], count: int) -> None:
    """One turn of the model's."""
    answer = await ask(args, sample, sampling_params, count)
    meta = answer["meta_info"]
    log_probs, tokens = [entry[0] for entry in meta["output_token_logprobs"]], [entry[1] for entry in meta["output_token_logprobs"]]
    sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, meta_info=meta, text=answer["text"])


async def plain_loop(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Greedy decoding by hand: one token a request, until an end token or the length."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    parameters = {"temperature": 0.0, "max_new_tokens": 1, "skip_special_tokens": True}
    async with aiohttp.ClientSession() as session:
        for _ in range(sampling_params["max_new_tokens"]):
            body = {"input_ids": sample.tokens, "sampling_params": parameters, "return_logprob": True}
            async with session.post(url, json=body) as response:
                response.raise_for_status()
                answer = await response.json()
            [(log_prob, token, *_)] = answer["meta_info"]["output_token_logprobs"]
            sample.append_response_tokens(args, tokens=[token], log_probs=[log_prob], meta_info=answer["meta_info"], text=answer["text"])
            if token in sampling_params["stop_token_ids"]:
                sample.status = Status.COMPLETED
                return sample
    sample.status = Status.TRUNCATED
    return sample


async def two_turns(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """The model, a tool, the model again."""
    await turn(args, sample, sampling_params, FIRST_TURN)
    sample.append_response_tokens(args, tokens=TOOL, trainable=False, text="[tool]")
    await turn(args, sample, sampling_params, SECOND_TURN)
    sample.metadata["turns"] = 2
    return sample


async def two_turns_with_a_break(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """As `two_turns`; between them it waits to be told to go on."""
    await turn(args, sample, sampling_params, FIRST_TURN)
    between.set()
    while not go_on.is_set():
        await asyncio.sleep(0.02)
    await turn(args, sample, sampling_params, SECOND_TURN)
    return sample


async def of_unknown_version(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """As slime's own: what the engine calls itself at the end of a call is all that it says about versions."""
    sample = await two_turns_with_a_break(args, sample, sampling_params)
    sample.weight_versions = [str(sample.weight_versions[-1])]
    return sample


async def fanned_out(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> list[HookSample]:
    """Each turn a sample of its own."""
    samples = []
    for count in (FIRST_TURN, SECOND_TURN):
        one = HookSample(prompt=sample.prompt, tokens=[*sample.tokens, count], label=sample.label, metadata={"turn": count})
        await turn(args, one, sampling_params, count)
        samples.append(one)
    return samples


def written(sample: HookSample) -> HookSample:
    """A finished sample without an engine."""
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.5, -0.25], text="ok")
    sample.status = Status.COMPLETED
    return sample


def recorded(args: Arguments, sample: HookSample, sampling_params: dict[str, Any], evaluation: bool = False) -> HookSample:
    """A plain function; says what it was called with."""
    calls.append(sample)
    sample.metadata |= {"evaluation": evaluation, "parameters": sampling_params, "thread": threading.current_thread().name}
    return written(sample)


async def blocking(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Blocks the loop that it runs on until it is told to go on."""
    between.set()
    if not go_on.wait(60):
        raise TimeoutError("nobody could say so")
    return written(sample)


async def hanging(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    calls.append(sample)
    await asyncio.sleep(3600)
    raise AssertionError


def hanging_plainly(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    calls.append(sample)
    time.sleep(3600)
    raise AssertionError


async def raising(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    calls.append(sample)
    raise ValueError("the tool is broken")


async def leaving(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    raise SystemExit(3)


async def cancelling(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    raise asyncio.CancelledError


async def failing_once(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Fails each rollout's first call, and aborts its second."""
    calls.append(sample)
    count = sum(one.session_id == sample.session_id for one in calls)
    if count == 1:
        sample.status = Status.FAILED
        return sample
    if count == 2:
        sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
        sample.status = Status.ABORTED
        return sample
    return written(sample)


async def without_log_probs(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    sample = written(sample)
    sample.rollout_log_probs = None
    return sample


async def nothing(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> None:
    return None
