"""A generate function: each sample gets as many tokens as its prompt's metadata says, whatever the model would end with."""

from typing import Any

from shared.hooks import Arguments, HookSample
from shared.hooks.slime.http_requests import post


async def generate(args: Arguments, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Returns the sample with ``metadata["lengths"][its index in the group]`` tokens; one that was aborted continues where it was."""
    lengths = sample.metadata["lengths"]
    left = lengths[(sample.index or 0) % len(lengths)] - sample.response_length
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    body = {
        "input_ids": sample.tokens,
        "sampling_params": {**sampling_params, "max_new_tokens": left, "ignore_eos": True},
        "return_logprob": True,
    }
    meta = (await post(url, body))["meta_info"]
    log_probs, tokens = [entry[0] for entry in meta["output_token_logprobs"]], [entry[1] for entry in meta["output_token_logprobs"]]
    sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, meta_info=meta)
    return sample
