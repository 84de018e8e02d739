"""OpenAI's completions: ``POST /v1/chat/completions`` and ``/v1/completions``.

Beside OpenAI's own fields those that its clients send by ``extra_body`` to other servers: ``min_version``, ``top_k``, ``min_tokens``,
``repetition_penalty``, ``stop_token_ids``, ``return_token_ids``.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Discriminator, Field, Tag

from shared.formats import request as wire
from shared.formats import request_body as fields
from shared.formats.request_body import RequestFields, read_body
from shared.sessions.session import MOST_TOP

# Why whatever would have tokens sampled under a constraint is refused
UNCONSTRAINED = "what is sampled is the policy's own: nothing constrains it, or its log-probs would be another's"
MOST_CHOICES = 64
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
TopCount = Annotated[int, Field(ge=0, le=MOST_TOP)]


class _SystemMessage(RequestFields):
    WITHOUT_EFFECT = frozenset({"name"})

    role: Literal["system", "developer"]
    content: fields.Texts

    def chat(self) -> dict[str, Any]:
        return {"role": "system", "content": fields.joined(self.content)}


class _UserMessage(RequestFields):
    WITHOUT_EFFECT = frozenset({"name"})

    role: Literal["user"]
    content: fields.Parts

    def chat(self) -> dict[str, Any]:
        return {"role": "user", "content": fields.joined(self.content)}


class _Function(RequestFields):
    name: fields.CalledName
    arguments: fields.Arguments = "{}"


class _Call(RequestFields):
    ECHOED = frozenset({"index", "provider_specific_fields"})

    id: fields.CallId
    type: Literal["function"] = "function"
    function: _Function


class _AssistantMessage(RequestFields):
    WITHOUT_EFFECT = frozenset({"name"})
    ECHOED = frozenset({"annotations", "malformed_tool_calls", "provider_specific_fields"})

    role: Literal["assistant"]
    content: fields.Texts = []
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: Annotated[list[_Call], Field(max_length=fields.MAX_CALLS, fail_fast=True)] = []

    def chat(self) -> dict[str, Any]:
        calls = [wire.chat_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls]
        return wire.assistant(fields.joined(self.content), self.reasoning_content or self.reasoning, calls)


class _ToolMessage(RequestFields):
    role: Literal["tool"]
    content: fields.Parts
    tool_call_id: fields.CallId
    name: fields.ToolName | None = None

    def chat(self) -> dict[str, Any]:
        named = {"name": self.name} if self.name else {}
        return {"role": "tool", "tool_call_id": self.tool_call_id, "content": fields.joined(self.content), **named}


class _FunctionTool(RequestFields):
    WITHOUT_EFFECT = frozenset({"strict"})

    name: fields.ToolName
    description: str | None = None
    parameters: fields.AnyObject | None = None


class _Tool(RequestFields):
    type: Literal["function"]
    function: _FunctionTool


class _StreamOptions(RequestFields):
    WITHOUT_EFFECT = frozenset({"include_obfuscation"})

    include_usage: bool = False


class _JsonSchema(RequestFields):
    name: str = ""
    description: str | None = None
    strict: bool = False
    definition: fields.AnyObject | None = Field(default=None, alias="schema")


class TextFormat(_JsonSchema):
    """The form of an answer's text, as responses have it."""

    type: Literal["text", "json_object", "json_schema"]

    def constraint(self, field: str) -> list[wire.Constraint]:
        """Returns what holds an answer to it. ``field``: its place in the body. Raises TurnRefused without a schema where one is needed."""
        if self.type == "json_schema" and self.definition is None:
            raise wire.TurnRefused(400, "expected a schema for json_schema", field=field, code="missing_parameter")
        return [] if self.type == "text" else [wire.json_constraint(field, self.definition if self.type == "json_schema" else None)]


class _ResponseFormat(RequestFields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema = _JsonSchema()

    def constraint(self, field: str) -> list[wire.Constraint]:
        return TextFormat(type=self.type, definition=self.json_schema.definition).constraint(field)


_Message = Annotated[_SystemMessage | _UserMessage | _AssistantMessage | _ToolMessage, Field(discriminator="role")]


class OpenAIBody(fields.ChatSamplingFields):
    """The fields that chat completions and responses share."""

    # fmt: off
    WITHOUT_EFFECT = frozenset({
        "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
    })
    # fmt: on

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: fields.TopP | None = None
    stream: bool = False
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: TopCount = 0

    def tool_use(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the fields of a turn that say how tools are used. Raises TurnRefused."""
        single = [] if self.parallel_tool_calls or not tools or self.tool_choice == "none" else [wire.single_call("parallel_tool_calls")]
        if self.tool_choice in ("auto", "none"):
            return {"tools": tools, "tool_choice": self.tool_choice, "constraints": (*single,)}
        names, required = _chosen(self.tool_choice)
        return {"tools": tools, "constraints": (wire.call_constraint("tool_choice", names, tools, required=required), *single)}


class _ChatBody(OpenAIBody):
    WITHOUT_EFFECT = OpenAIBody.WITHOUT_EFFECT | {"prediction", "reasoning_effort", "verbosity"}

    messages: Annotated[list[_Message], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]
    max_tokens: fields.Positive | None = None
    max_completion_tokens: fields.Positive | None = None
    stop: fields.Stops = []
    n: Choices = 1
    stream_options: _StreamOptions | None = None
    tools: Annotated[list[_Tool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] = []
    logprobs: bool = False
    response_format: _ResponseFormat | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    modalities: list[Literal["text"]] = ["text"]
    return_token_ids: bool = False


def parse(body: bytes, request_id: str) -> wire.ChatTurn:
    """Returns the turn that a body asks for. Raises TurnRefused."""
    asked, ignored = read_body(_ChatBody, body)
    check_served(*_penalties(asked), (asked.top_logprobs > 0 and not asked.logprobs, "top_logprobs", "only with logprobs = true"))
    messages = [message.chat() for message in asked.messages]
    fields.check_tool_results(messages, "messages")
    used = asked.tool_use(
        [wire.function_tool(tool.function.name, tool.function.description, tool.function.parameters) for tool in asked.tools]
    )
    most = min((given for given in (asked.max_tokens, asked.max_completion_tokens) if given), default=None)
    used["constraints"] += tuple(asked.response_format.constraint("response_format")) if asked.response_format else ()
    return wire.ChatTurn(
        request_id=request_id,
        model=asked.model,
        messages=messages,
        variables=asked.chat_template_kwargs,
        **used,
        sampling=sampling(asked, most, asked.temperature, asked.top_p, asked.stop),
        stream=asked.stream,
        stream_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
        token_ids=asked.return_token_ids,
        min_version=asked.min_version,
        choices=asked.n,
        ignored=ignored,
        pictures=fields.pictures_of(asked.messages),
    )


_Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[fields.TokenIds, Tag("ids")],
    Discriminator(lambda given: "text" if isinstance(given, str) else "ids"),
]


def _prompts(given: Any) -> list[Any]:
    """Returns the prompts of a request: a text or a list of token ids is one."""
    return given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]


class _CompletionBody(fields.SamplingFields):
    WITHOUT_EFFECT = frozenset({"user"})

    model: str
    min_version: fields.Version = 0
    prompt: Annotated[list[_Prompt], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True), BeforeValidator(_prompts)]
    max_tokens: fields.Positive = 16
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: fields.TopP | None = None
    stop: fields.Stops = []
    n: Choices = 1
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    logprobs: TopCount | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    return_token_ids: bool = False


def parse_completion(body: bytes, request_id: str) -> wire.TokenTurn:
    """Returns the turn that a body of ``/v1/completions`` asks for. Raises TurnRefused."""
    asked, ignored = read_body(_CompletionBody, body)
    prompts = [one if isinstance(one, str) else np.asarray(one, np.int32) for one in asked.prompt]
    too_many = f"{len(prompts)} prompts of {asked.n} answers each; expected at most {MOST_CHOICES} answers"
    check_served(*_penalties(asked), (len(prompts) * asked.n > MOST_CHOICES, "n", too_many))
    return wire.TokenTurn(
        request_id=request_id,
        model=asked.model,
        prompt=prompts[0],
        further=tuple(prompts[1:]),
        sampling=sampling(asked, asked.max_tokens, asked.temperature, asked.top_p, asked.stop),
        spelled=True,
        stream=asked.stream,
        stream_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        logprobs=asked.logprobs is not None,
        top_logprobs=asked.logprobs or 0,
        token_ids=asked.return_token_ids,
        min_version=asked.min_version,
        choices=asked.n,
        place="prompt",
        ignored=ignored,
    )


def _penalties(asked: "_ChatBody | _CompletionBody") -> tuple[tuple[bool, str, str], ...]:
    return (
        (asked.frequency_penalty != 0, "frequency_penalty", f"expected 0: {UNCONSTRAINED}"),
        (asked.presence_penalty != 0, "presence_penalty", f"expected 0: {UNCONSTRAINED}"),
        (bool(asked.logit_bias), "logit_bias", f"expected none: {UNCONSTRAINED}"),
        (asked.stream_options is not None and not asked.stream, "stream_options", "only with stream = true"),
    )


def check_served(*refusals: tuple[bool, str, str]) -> None:
    """Raises TurnRefused for what is read but not served: the first of (whether it is refused, its field, why)."""
    for refused, field, message in refusals:
        if refused:
            raise wire.TurnRefused(400, message, field=field, code="unsupported_value")


def _chosen(choice: Any) -> tuple[list[str], bool]:
    """Returns the tools that a request's ``tool_choice`` names, and whether one has to be called. Raises TurnRefused."""
    if choice == "required":
        return [], True
    try:
        kind = choice["type"]
        inner = choice.get(kind, choice)  # chat completions have an object of the type's name inside
        named = {"function": lambda: [inner], "allowed_tools": lambda: inner["tools"]}[kind]()
        names = [str(one.get("function", one)["name"]) for one in named]
        return [names[0], *names[1:]], kind == "function" or {"auto": False, "required": True}[inner.get("mode", "auto")]
    except (LookupError, TypeError, AttributeError):
        message = "expected auto, none, required, a function by its name, or allowed_tools"
        raise wire.TurnRefused(400, message, field="tool_choice", code="invalid_value") from None


def sampling(
    asked: fields.SamplingFields, max_tokens: int | None, temperature: float | None, top_p: float | None, stop: Sequence[str]
) -> wire.RequestedSampling:
    """Returns how a request has its tokens generated."""
    return wire.RequestedSampling(
        temperature=temperature,
        top_p=top_p,
        top_k=asked.top_k,
        max_tokens=max_tokens,
        min_tokens=asked.min_tokens,
        repetition_penalty=asked.repetition_penalty,
        seed=asked.seed,
        stop=tuple(stop),
        stop_token_ids=tuple(asked.stop_token_ids),
    )


def answer(turn: wire.ChatTurn | wire.TokenTurn, *results: wire.TurnResult) -> dict[str, Any]:
    """Returns the completion, of chat or text, with the result of each choice."""
    spelled = isinstance(turn, wire.TokenTurn)
    choices = [
        {"index": at, **({"text": result.content} if spelled else {"message": _message(result)}), "logprobs": _logprobs(turn, result)}
        | {"finish_reason": result.finish, **_token_ids(turn, result)}
        for at, result in enumerate(results)
    ]
    return {
        "id": results[0].request_id,
        "object": "text_completion" if spelled else "chat.completion",
        "created": results[0].created,
        "model": results[0].model,
        "choices": choices,
        "usage": token_usage(*(result.usage for result in results), choices=turn.choices),
        **_beside(turn, *results),
    }


class ChatEvents(wire.TurnEvents):
    """The chunks of a streamed chat completion."""

    KIND = "chat.completion.chunk"
    _calls = 0

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, piece: wire.TurnDelta) -> bytes:
        fields: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.content:
            fields["content"] = piece.content
        if piece.tool_call is not None:
            fields["tool_calls"] = [{"index": self._calls, **_call(piece.tool_call)}]
            self._calls += 1
        return self._chunk(fields)

    def end(self, result: wire.TurnResult) -> bytes:
        ids, extra = _token_ids(self.turn, result), _beside(self.turn, result)
        return self._chunk(wire.malformed(result), result.finish, _logprobs(self.turn, result), ids, extra)

    def close(self, results: Sequence[wire.TurnResult]) -> bytes:
        usage = {"usage": token_usage(*(result.usage for result in results), choices=self.turn.choices)}
        return (wire.event(self._envelope([], usage)) if self.turn.stream_usage else b"") + b"data: [DONE]\n\n"

    def refused(self, error: wire.TurnRefused) -> bytes:
        return wire.event(error.body("openai"))

    def _chunk(
        self,
        delta: Mapping[str, Any],
        finish: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
        in_choice: Mapping[str, Any] = {},
        beside: Mapping[str, Any] = {},
    ) -> bytes:
        choice = {"index": self.turn.choice, **self._choice(delta), "logprobs": logprobs, "finish_reason": finish, **in_choice}
        return wire.event(self._envelope([choice], {"usage": None, **beside} if self.turn.stream_usage else beside))

    def _choice(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"delta": delta}

    def _envelope(self, choices: list[Any], beside: Mapping[str, Any]) -> dict[str, Any]:
        start = self.start
        head = {"id": start.request_id, "object": self.KIND, "created": start.created, "model": start.model}
        return {**head, "choices": choices, **beside}


class CompletionEvents(ChatEvents):
    """The chunks of a streamed text completion."""

    KIND = "text_completion"

    def begin(self) -> bytes:
        return b""

    def _choice(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}


def _message(result: wire.TurnResult) -> dict[str, Any]:
    content = None if result.tool_calls and not result.content else result.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if result.reasoning:
        message["reasoning_content"] = result.reasoning
    if result.tool_calls:
        message["tool_calls"] = [_call(call) for call in result.tool_calls]
    return message | wire.malformed(result)


def _call(call: wire.CalledTool) -> dict[str, Any]:
    return wire.chat_call(call.id, call.name, call.arguments)


def token_usage(*usages: wire.TurnUsage, choices: int = 1) -> dict[str, Any]:
    """Returns the usage of a request in OpenAI's words: of all its answers, and of its prompts, of which each has ``choices`` of them."""
    prompt, completion = sum(usage.prompt for usage in usages[::choices]), sum(usage.completion for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached for usage in usages[::choices])},
    }


def token_logprobs(tokens: wire.TurnTokens) -> list[dict[str, Any]]:
    """Returns the log-prob of each sampled token, with its text and bytes, and those of the likeliest ones at its place."""
    named = lambda text, logprob: {"token": text.decode(errors="replace"), "bytes": list(text), "logprob": logprob}  # noqa: E731
    sampled = zip(tokens.texts, tokens.logprobs.tolist(), tokens.top, strict=True)
    return [named(text, logprob) | {"top_logprobs": [named(*one) for one in top]} for text, logprob, top in sampled]


def _logprobs(turn: wire.ChatTurn | wire.TokenTurn, result: wire.TurnResult) -> dict[str, Any] | None:
    if not turn.logprobs or result.tokens is None:
        return None
    if isinstance(turn, wire.TokenTurn):
        tokens = [text.decode(errors="replace") for text in result.tokens.texts]
        offsets = list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)]
        logprobs = result.tokens.logprobs.tolist()
        # of several tokens with one text the likeliest counts, and the sampled one, which is there in any case, before all
        likeliest = ([(text.decode(errors="replace"), logprob) for text, logprob in reversed(row)] for row in result.tokens.top)
        top = [dict([*row, own]) for row, own in zip(likeliest, zip(tokens, logprobs, strict=True), strict=True)]
        head = {"tokens": tokens, "token_logprobs": logprobs, "text_offset": offsets}
        return {**head, "top_logprobs": top if turn.top_logprobs else None}
    return {"content": token_logprobs(result.tokens), "refusal": None}


def _token_ids(turn: wire.ChatTurn | wire.TokenTurn, result: wire.TurnResult) -> dict[str, Any]:
    if not turn.token_ids or result.tokens is None:
        return {}
    prompt = {"prompt_token_ids": result.tokens.prompt.tolist()} if isinstance(turn, wire.TokenTurn) and turn.further else {}
    return {"token_ids": result.tokens.completion.tolist(), **prompt}


def _beside(turn: wire.ChatTurn | wire.TokenTurn, *results: wire.TurnResult) -> dict[str, Any]:
    """Returns what the answer has beside OpenAI's fields: the weights' versions, and the prompt's tokens where they are asked for."""
    found, tokens = [wire.beside(result)["weight_versions"] for result in results], results[0].tokens
    versions = {"oldest": min(one["oldest"] for one in found), "newest": max(one["newest"] for one in found)}
    return {"weight_versions": versions, **({"prompt_token_ids": tokens.prompt.tolist()} if turn.token_ids and tokens is not None else {})}
