"""Tokens in, tokens out: ``POST /inference/v1/generate``, which training clients of environments speak (vLLM's endpoint of that name).

The chat template is the client's: it sends a whole prompt as ids, and is told the ids that were drawn, each with its log-prob. Errors have
OpenAI's shape.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from services.gateway.wire.openai_chat import UNCONSTRAINED
from services.gateway.wire.request import RequestedSampling, TokenTurn, TurnResult
from services.gateway.wire.request_body import Positive, RequestFields, StopIds, StopTexts, TopK, TopP, Version, read_body
from services.gateway.wire.turn_events import aborted
from services.gateway.wire.turn_refused import TurnRefused
from shared.schema.message import LARGEST

LONGEST_PROMPT = 1 << 22
"""Tokens."""


class _SamplingFields(RequestFields):
    WITHOUT_EFFECT = frozenset(
        {
            "detokenize",
            "include_stop_str_in_output",
            "output_kind",
            "reasoning_effort",
            "routed_experts_prompt_start",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        }
    )

    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    max_tokens: Positive | None = None
    min_tokens: Version | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    seed: Version | None = None
    stop: Annotated[StopTexts, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = []
    stop_token_ids: StopIds = []
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
    token_ids: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST)]], Field(min_length=1, max_length=LONGEST_PROMPT, fail_fast=True)]
    sampling_params: _SamplingFields = _SamplingFields()
    stream: Literal[False] = False
    min_version: Version = 0


def parse(body: bytes, request_id: str) -> TokenTurn:
    """Returns the turn that a body asks for. Raises TurnRefused."""
    asked, ignored = read_body(_GenerateBody, body)
    drawn = asked.sampling_params
    for field in ("min_p", "frequency_penalty", "presence_penalty"):
        if getattr(drawn, field):
            raise TurnRefused(400, f"expected 0: {UNCONSTRAINED}", field=f"sampling_params.{field}", code="unsupported_value")
    return TokenTurn(
        request_id=request_id,
        model=asked.model,
        prompt=np.asarray(asked.token_ids, np.int32),
        sampling=RequestedSampling(
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            top_k=drawn.top_k,
            max_tokens=drawn.max_tokens,
            min_tokens=drawn.min_tokens,
            repetition_penalty=drawn.repetition_penalty,
            seed=drawn.seed,
            stop=tuple(drawn.stop),
            stop_token_ids=tuple(drawn.stop_token_ids),
        ),
        min_version=asked.min_version,
        ignored=ignored,
    )


def answer(turn: TokenTurn, result: TurnResult) -> dict[str, Any]:
    """Returns the drawn tokens. Raises TurnRefused where the turn was aborted."""
    if result.finish == "abort":
        raise aborted()
    assert result.tokens is not None  # a token turn is asked for them
    completion = result.tokens.completion.tolist()
    choice = {
        "index": 0,
        "token_ids": completion,
        "logprobs": {"content": _logprobs(completion, result.tokens.logprobs.tolist())},
        "finish_reason": "length" if result.finish == "length" else "stop",
        "routed_experts": None,
    }
    usage = result.usage
    return {
        "request_id": result.request_id,
        "model": result.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        },
        "weight_versions": {"oldest": result.versions[0], "newest": result.versions[1]},
    }


def _logprobs(completion: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    return [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in zip(completion, logprobs, strict=True)]
