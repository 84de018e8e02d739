"""Functions for ``rollout.custom_generate_function_path``: good ones, and ones that misbehave.

They run in processes of their own; files in the directory of the variable `DIRECTORY` are what they and the tests tell each other.
"""

import asyncio
import ctypes
import json
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from shared.hooks import Arguments, HookSample, Status
from shared.hooks.slime.http_requests import post

TOOL = [20, 21, 22]
"""What a tool answers, as tokens."""

FIRST_TURN, SECOND_TURN = 5, 7
"""Tokens of each."""

DIRECTORY = "HOOK_DIRECTORY"


def told(word: str) -> bool:
    """Whether somebody has said so: ``between`` (a function is between its turns), ``go_on`` (it may continue)."""
    return (Path(os.environ[DIRECTORY]) / word).exists()


def tell(word: str) -> None:
    (Path(os.environ[DIRECTORY]) / word).touch()


def noted(sample: HookSample) -> int:
    """Notes a call. Returns how many calls its rollout had by now."""
    directory = Path(os.environ[DIRECTORY])
    note = directory / f"call-{time.monotonic_ns():020d}-{uuid.uuid4().hex}.json"
    names = ("group_index", "index", "rollout_id", "session_id", "prompt", "tokens", "label", "response_length")
    fields = {**{name: getattr(sample, name) for name in names}, "status": sample.status.value, "pid": os.getpid()}
    note.with_suffix(".part").write_text(json.dumps(fields))
    note.with_suffix(".part").rename(note)
    name = str(sample.session_id).rpartition(".")[0]  # its end is of this call
    return sum(call["session_id"].startswith(f"{name}.") for call in calls())


def calls() -> list[dict[str, Any]]:
    """What `recorded` and those that fail were called with, in order."""
    return [json.loads(path.read_text()) for path in sorted(Path(os.environ[DIRECTORY]).glob("call-*.json"))]


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


async def shifted_by_two(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """As slime's functions fill the fields, with two tokens of a tool that ``response_length`` does not count."""
    answer = await ask(args, sample, sampling_params, FIRST_TURN)
    drawn = answer["meta_info"]["output_token_logprobs"]
    sample.tokens = [*sample.tokens, *(entry[1] for entry in drawn), *TOOL[:2]]
    sample.response, sample.response_length = answer["text"], FIRST_TURN
    sample.rollout_log_probs, sample.status = [entry[0] for entry in drawn], Status.COMPLETED
    return sample


async def tool_without_mask(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """The same, counted, and trained with log-probs of 0.0."""
    sample = await shifted_by_two(args, sample, sampling_params)
    sample.response_length += 2
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), 0.0, 0.0]
    return sample


async def masked_as_stale(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """`two_turns`, of which the first is not trained, and has no log-probs any more."""
    sample = await two_turns(args, sample, sampling_params)
    first = FIRST_TURN + len(TOOL)
    sample.loss_mask = [0] * first + [1] * SECOND_TURN
    sample.rollout_log_probs = [0.0] * first + (sample.rollout_log_probs or [])[first:]
    return sample


async def named_turns(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Two turns by a client of its own that names the sample, as slime's adapters do, and keeps no versions; between them it waits."""
    url, start = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", len(sample.tokens)
    noted(sample)
    sample.rollout_log_probs, sample.loss_mask = [], []
    for count, tool, more in ((FIRST_TURN, TOOL, {}), (SECOND_TURN, [], {"repetition_penalty": 1.5, "min_new_tokens": 1})):
        body = {
            "rid": "any",
            "input_ids": sample.tokens,
            "sampling_params": {**sampling_params, "max_new_tokens": count, **more},
            "return_logprob": True,
        }
        async with aiohttp.ClientSession() as session:
            answer = await session.post(url, json=body, headers={"X-SMG-Routing-Key": str(sample.session_id)})
            assert answer.status == 200, await answer.text()
            assert answer.headers.get("X-Myxo-Sampling-Of-Task", "") == ", ".join(more), "what stands as the task has it"
            sampled = (await answer.json())["meta_info"]["output_token_logprobs"]
        sample.tokens = [*sample.tokens, *(token for _, token, _ in sampled), *tool]
        sample.rollout_log_probs += [*(log_prob for log_prob, _, _ in sampled), *(0.0 for _ in tool)]
        sample.loss_mask += [1] * len(sampled) + [0] * len(tool)
        tell("between")
        while tool and not told("go_on"):
            await asyncio.sleep(0.02)
    sample.response_length, sample.status = len(sample.tokens) - start, Status.COMPLETED
    return sample


async def two_turns_with_a_break(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """As `two_turns`; between them it waits to be told to continue."""
    await turn(args, sample, sampling_params, FIRST_TURN)
    tell("between")
    while not told("go_on"):
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
    noted(sample)
    sample.metadata |= {"evaluation": evaluation, "parameters": sampling_params, "thread": threading.current_thread().name}
    return written(sample)


async def blocking(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Blocks the loop that it runs on until it is told to continue."""
    tell("between")
    while not told("go_on"):
        time.sleep(0.02)
    return written(sample)


async def misbehaving(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """The second of three rollouts does what its label says, ``once`` or ``always``, when the others are there; those wait until it has."""
    count, (act, times) = noted(sample), str(sample.label).rsplit(" ", 1)
    if act == "wait" or sample.index is None or sample.index % 3 != 1:
        while not told("misbehaved"):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        return written(sample)
    while len(calls()) < 5:
        await asyncio.sleep(0.05)
    tell("misbehaved")
    if times == "once" and count > 1:
        return written(sample)
    return await done_amiss(act, sample)


async def done_amiss(act: str, sample: HookSample) -> HookSample:
    match act:
        case "crash":
            ctypes.string_at(0)
        case "raise":
            raise ValueError("the tool is broken")
        case "hang":
            await asyncio.sleep(3600)
        case "cancel":
            raise asyncio.CancelledError
        case "give up":
            sample = written(sample)
            sample.status, sample.reward = Status.ABORTED, 0.25
        case "abort":
            sample.status = Status.ABORTED
        case "give what does not fit":
            sample.response_length = 10_000
    return sample


async def of_partial_rollouts(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """As slime's own: one generation, continued where the sample comes back."""
    noted(sample)
    parameters = {**sampling_params, "max_new_tokens": sampling_params["max_new_tokens"] - sample.response_length}
    output = await post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {"input_ids": sample.tokens, "sampling_params": parameters, "return_logprob": True},
    )
    drawn = output["meta_info"].get("output_token_logprobs") or []
    sample.append_response_tokens(
        args, tokens=[one[1] for one in drawn], log_probs=[one[0] for one in drawn], meta_info=output["meta_info"], text=output["text"]
    )
    sample.parts = getattr(sample, "parts", 0) + 1
    return sample


async def of_other_enums(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Gives what users of slime give: a reward, attributes of its own, a status in words, arrays."""
    sample = written(sample)
    sample.status, sample.reward = "truncated", {"score": np.float32(0.5), "pred": "42"}
    sample.tool_call_count, sample.payload_text, sample.lock = 3, "a payload", threading.Lock()
    sample.tokens, sample.rollout_log_probs = np.asarray(sample.tokens), np.asarray(sample.rollout_log_probs)
    sample.train_metadata, sample.non_generation_time = {"loss": "own"}, 1.5
    args.of_this_process = args.rollout_batch_size
    return sample


async def hanging(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    noted(sample)
    await asyncio.sleep(3600)
    raise AssertionError


def hanging_plainly(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    noted(sample)
    time.sleep(3600)
    raise AssertionError


async def raising(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    noted(sample)
    raise ValueError("the tool is broken")


async def leaving(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    raise SystemExit(3)


async def cancelling(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    raise asyncio.CancelledError


async def failing_once(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Fails each rollout's first call, and aborts its second."""
    count = noted(sample)
    if count == 1:
        sample.status = Status.FAILED
        return sample
    if count == 2:
        sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
        sample.status = Status.ABORTED
        return sample
    return written(sample)


async def failing_later(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Has each rollout's first call aborted, and fails its second."""
    match noted(sample):
        case 1:
            sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
            sample.status = Status.ABORTED
            return sample
        case 2:
            raise ValueError("the tool is broken")
    return written(sample)


async def without_log_probs(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    sample = written(sample)
    sample.rollout_log_probs = None
    return sample


async def nothing(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> None:
    return None


async def of_label(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> Any:
    """Does as the function does that the label names."""
    return await globals()[str(sample.label)](args, sample, sampling_params)


def noting_hook(args: Arguments, sample: HookSample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """Notes what a hook of samples is given."""
    sample.metadata["seen"] = [rollout_id, evaluation, sample.status.value]


async def masking_hook(args: Arguments, sample: HookSample, **_: Any) -> HookSample:
    """Takes the first token of a sample that the hook before it has seen out of the loss."""
    assert "seen" in sample.metadata
    sample.loss_mask = [0, *(sample.loss_mask or [1] * sample.response_length)[1:]]
    return sample
