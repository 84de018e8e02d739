"""Tokens in, tokens out: ``POST /inference/v1/generate``, which training clients of environments speak (vLLM's endpoint of that name).

The chat template is the client's: it sends a whole prompt as ids, and gets the sampled ids, each with its log-prob. Errors have
OpenAI's shape.
"""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from shared.formats.openai_chat import UNCONSTRAINED, sampling, token_usage
from shared.formats.request import TokenTurn, TurnRefused, TurnResult, beside
from shared.formats.request_body import Positive, RequestFields, SamplingFields, Stops, TokenIds, TopP, Version, read_body


class _SamplingFields(SamplingFields):
    # fmt: off
    WITHOUT_EFFECT = frozenset({
        "detokenize", "include_stop_str_in_output", "output_kind", "reasoning_effort", "routed_experts_prompt_start",
        "skip_special_tokens", "spaces_between_special_tokens",
    })
    # fmt: on

    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: TopP | None = None
    max_tokens: Positive | None = None
    stop: Stops = []
    n: Literal[1] = 1
    logprobs: Annotated[int, Field(ge=0, le=1)] = 1
    prompt_logprobs: None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: Literal[False] = False


class _GenerateBody(RequestFields):
    WITHOUT_EFFECT = frozenset({"cache_salt", "priority", "request_id", "return_token_ids"})

    model: str | None = None
    token_ids: TokenIds
    sampling_params: _SamplingFields = _SamplingFields()
    stream: Literal[False] = False
    min_version: Version = 0


def parse(body: bytes, request_id: str) -> TokenTurn:
    """Returns the turn that a body asks for. Raises TurnRefused."""
    asked, ignored = read_body(_GenerateBody, body)
    generated = asked.sampling_params
    for field in ("min_p", "frequency_penalty", "presence_penalty"):
        if getattr(generated, field):
            raise TurnRefused(400, f"expected 0: {UNCONSTRAINED}", field=f"sampling_params.{field}", code="unsupported_value")
    return TokenTurn(
        request_id=request_id,
        model=asked.model,
        prompt=np.asarray(asked.token_ids, np.int32),
        sampling=sampling(generated, generated.max_tokens, generated.temperature, generated.top_p, generated.stop),
        min_version=asked.min_version,
        ignored=ignored,
    )


def answer(turn: TokenTurn, result: TurnResult) -> dict[str, Any]:
    """Returns the sampled tokens."""
    versions = {"weight_versions": beside(result)["weight_versions"]}
    assert result.tokens is not None  # a token turn is asked for them
    completion = result.tokens.completion.tolist()
    generated = zip(completion, result.tokens.logprobs.tolist(), strict=True)
    choice = {
        "index": 0,
        "token_ids": completion,
        "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in generated]},
        "finish_reason": "length" if result.finish == "length" else "stop",
        "routed_experts": None,
    }
    return {"request_id": result.request_id, "model": result.model, "choices": [choice], "usage": token_usage(result.usage), **versions}
