"""A generate function: each sample gets as many tokens as its prompt's metadata says, whatever the model would end with."""

from typing import Any

from shared.hooks import Arguments, HookSample, Status
from shared.hooks.slime.http_requests import post


async def generate(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Returns the sample with ``metadata["lengths"][its index in the group]`` tokens; one that was aborted goes on where it was."""
    lengths = sample.metadata["lengths"]
    left = lengths[(sample.index or 0) % len(lengths)] - sample.response_length
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    body = {
        "input_ids": sample.tokens,
        "sampling_params": {**sampling_params, "max_new_tokens": left, "ignore_eos": True},
        "return_logprob": True,
    }
    meta = (await post(url, body))["meta_info"]
    drawn = [(float(log_prob), int(token)) for log_prob, token, *_ in meta["output_token_logprobs"]]
    sample.tokens = [*sample.tokens, *(token for _, token in drawn)]
    sample.response_length += len(drawn)
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *(log_prob for log_prob, _ in drawn)]
    sample.status = Status.ABORTED if meta["finish_reason"]["type"] == "abort" else Status.COMPLETED
    return sample
