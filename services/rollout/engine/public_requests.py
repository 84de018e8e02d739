"""The requests that others may send to an engine: each field by name, within bounds. It is pure and does no I/O.

An engine takes many more fields. Some of them read files and addresses, load adapters, name other hosts, or carry code; and values out of
range end its scheduler. So a request is read into these models and written anew from them. What they do not know is refused by name, unless
it is null or false: routers send switches that are off.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from services.rollout.engine.transport import InvalidRequest
from shared.config.speculation import reshaped
from shared.formats.request_body import Stops

MAX_SAMPLES = 128  # the most generations that one request may ask for
MAX_FIELDS = 128  # the most fields of one object
UNBOUNDED = 2**31 - 1  # more tokens than any engine generates; it stops at the end of its context

# Fields that a router adds. The proxy gives each request an id of its own: with one that it knows it can end it.
IGNORED = {"rid", "log_metrics"}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_off(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > MAX_FIELDS:
            raise ValueError(f"{len(fields)} fields; expected at most {MAX_FIELDS}")
        known = cls.model_fields
        return {name: value for name, value in fields.items() if value is not None and (name in known or value is not False)}

    @field_validator("input_ids", "stop_token_ids", "token_ids_logprob", check_fields=False)
    @classmethod
    def _in_vocabulary(cls, tokens: Any, info: ValidationInfo) -> Any:
        vocabulary = info.context or 0
        for one in tokens if _nested(tokens) else [tokens]:
            for token in (min(one), max(one)) if one else ():
                if not 0 <= token < vocabulary:
                    raise ValueError(f"token {token} is not in [0, {vocabulary})")
        return tokens

    @field_validator("top_k", check_fields=False)
    @classmethod
    def _some_or_all(cls, top_k: int) -> int:
        if top_k == 0:
            raise ValueError("expected at least 1, or -1 for all")
        return top_k


Count = Annotated[int, Field(ge=0, le=UNBOUNDED)]
TokenIds = Annotated[list[int], Field(max_length=2**22, fail_fast=True)]  # or a million wrong elements would make a million errors
Temperature = Annotated[float, Field(ge=0, le=1000)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopK = Annotated[int, Field(ge=-1, le=1 << 30)]
Seed = Annotated[int, Field(ge=0, le=UNBOUNDED)]


class _Drawing(_Request):
    """How tokens are generated, in the words that both kinds of request share."""

    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: TopK = -1
    min_p: Share = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Stops = []
    stop_token_ids: Annotated[TokenIds, Field(max_length=256)] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False


class SamplingParams(_Drawing):
    """``sampling_params`` of `/generate`."""

    max_new_tokens: Count = 128
    min_new_tokens: Count = 0
    spaces_between_special_tokens: bool = True
    sampling_seed: Seed = 0
    custom_params: dict[Literal["return_top_p_token_ids"], bool] = {}


LOST_IN_TURNS = {"min_p", "presence_penalty", "frequency_penalty"}  # gateways know none of them
KEPT: Literal["return_top_p_token_ids"] = "return_top_p_token_ids"
PROMPTS = Field(min_length=1, max_length=MAX_SAMPLES, fail_fast=True)


class GenerateRequest(_Request):
    """A request to `/generate`: one prompt or several, as text or as tokens."""

    model: str = ""
    text: str | Annotated[list[str], PROMPTS] = ""
    input_ids: Annotated[list[TokenIds], PROMPTS] | TokenIds = []
    sampling_params: SamplingParams | Annotated[list[SamplingParams], PROMPTS] = SamplingParams()
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1, le=UNBOUNDED)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=20)] = 0
    token_ids_logprob: Annotated[TokenIds, Field(max_length=1024)] = []
    return_text_in_logprobs: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: Count = 0
    image_data: None = None

    @property
    def prompts(self) -> int:
        """Returns the number of prompts."""
        return len(self.text) if isinstance(self.text, list) else len(self.input_ids) if _nested(self.input_ids) else 1

    @property
    def returns_kept(self) -> bool:
        """Returns whether the kept tokens are asked for, as slime's functions ask."""
        return isinstance(self.sampling_params, SamplingParams) and self.sampling_params.custom_params.get(KEPT, False)

    @property
    def is_turn(self) -> bool:
        """Returns whether gateways can answer it: the ids of one prompt, one sample, and nothing beside its tokens and log-probs."""
        one = self.sampling_params
        if not self.input_ids or _nested(self.input_ids) or isinstance(one, list):
            return False
        beside = self.return_routed_experts or self.top_logprobs_num or self.token_ids_logprob or self.return_text_in_logprobs
        plain = not (one.ignore_eos or one.custom_params or self.stream or beside or self.logprob_start_len >= 0)
        lost = one.model_dump(include=LOST_IN_TURNS, exclude_defaults=True)
        return plain and not lost and one.n == 1 and one.max_new_tokens > 0

    @property
    def sampling(self) -> Sequence[_Drawing]:
        """Returns the parameters of its prompts, one for all or one for each."""
        return self.sampling_params if isinstance(self.sampling_params, list) else [self.sampling_params]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.text) == bool(self.input_ids):
            raise ValueError("expected a prompt in one of text and input_ids")
        prompts: Sequence[object] = self.text if isinstance(self.text, list) else self.input_ids if _nested(self.input_ids) else ()
        if not all(prompts):
            raise ValueError("an empty prompt")
        parameters = self.sampling_params if isinstance(self.sampling_params, list) else [self.sampling_params] * self.prompts
        if len(parameters) != self.prompts:
            raise ValueError(f"sampling_params has {len(parameters)} entries for {self.prompts} prompts")
        if sum(one.n for one in parameters) > MAX_SAMPLES:
            raise ValueError(f"expected at most {MAX_SAMPLES} samples in one request")
        if (self.stream or isinstance(self.sampling_params, list)) and any(one.custom_params.get(KEPT) for one in parameters):
            raise ValueError(f"{KEPT}: kept tokens come with whole answers, and for all prompts alike")
        return self


class _TextPart(_Request):
    type: Literal["text"]
    text: str


class _FunctionCall(_Request):
    name: str
    arguments: str | dict[str, Any]


class _ToolCall(_Request):
    id: str = ""
    type: Literal["function"] = "function"
    index: Count = 0
    function: _FunctionCall


class _ChatMessage(_Request):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_TextPart], Field(fail_fast=True)] = ""
    name: str = ""
    reasoning_content: str = ""
    tool_calls: Annotated[list[_ToolCall], Field(fail_fast=True)] = []
    tool_call_id: str = ""


class _ToolFunction(_Request):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class _Tool(_Request):
    type: Literal["function"] = "function"
    function: _ToolFunction


class _StreamOptions(_Request):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatRequest(_Drawing):
    """A request to `/v1/chat/completions`: text alone, and nothing that constrains what is generated by a grammar."""

    model: str = ""
    messages: Annotated[list[_ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: Count = 0
    max_completion_tokens: Count = 0
    min_tokens: Count = 0
    seed: Seed = 0
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: Annotated[list[_Tool], Field(max_length=128, fail_fast=True)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    user: str = ""
    continue_final_message: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False

    @property
    def prompts(self) -> int:
        return 1

    @property
    def sampling(self) -> Sequence[_Drawing]:
        return [self]


PublicRequest = GenerateRequest | ChatRequest


def parse_request(kind: type[PublicRequest], body: bytes, vocab_size: int, speculates: bool = False) -> PublicRequest:
    """Returns the request in a body of JSON. ``speculates``: whether the engine does. Raises InvalidRequest, which names the field."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("expected a JSON object")
    try:
        known = {name: value for name, value in fields.items() if name not in IGNORED}
        found = kind.model_validate(known, context=vocab_size)
    except ValidationError as error:
        raise InvalidRequest("; ".join(map(_problem, error.errors(include_input=False, include_context=False)[:3]))) from None
    for parameters in found.sampling if speculates else ():
        if problem := next(reshaped(parameters.model_dump()), None):
            raise InvalidRequest(str(problem))
    return found


def engine_body(request: PublicRequest, rid: str, cache_key: str, most_kept: int = 0) -> bytes:
    """Returns what the engine is asked: the given fields, under the proxy's id. Prefixes are shared under the same ``cache_key`` only.
    ``most_kept``: the ``top_k`` of a request that asks for kept tokens and has none."""
    fields = request.model_dump(exclude_unset=True) | {"extra_key": cache_key}
    if isinstance(request, GenerateRequest) and request.returns_kept:
        own, fields["return_sampling_mask"] = fields["sampling_params"], True
        own["top_k"] = own["top_k"] if own.get("top_k", -1) > 0 else most_kept
    if isinstance(request, GenerateRequest) and request.prompts > 1:
        return orjson.dumps(fields | {"rid": [f"{rid}-{index}" for index in range(request.prompts)]})
    return orjson.dumps(fields | {"rid": rid})


def _problem(error: Mapping[str, Any]) -> str:
    place = ".".join(str(step) for step in error["loc"])[:100]
    return f"{place}: {error['msg']}" if place else str(error["msg"])


def _nested(tokens: Sequence[Any]) -> bool:
    return bool(tokens) and isinstance(tokens[0], list)
