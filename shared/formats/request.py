"""A turn as the gateway knows it, whatever the format that it came in, what became of it, its streamed events, and the one refusal.

A *conversation* is a list of messages in OpenAI's chat form with nothing left open: ``role`` is system, user, assistant or tool;
``content`` is a string; an assistant's ``reasoning_content`` and ``tool_calls`` are there where they are not empty, and the arguments of a
call are JSON text. A picture is a mark in the content of a user or a tool (`picture_mark`). What a client sends back of an answer
parses to `assistant_message` of its result: in OpenAI's formats to the very same, with the reasoning where the client keeps it; in
Anthropic's with the arguments written anew, since they travel as an object.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from shared.data.media import Picture
from shared.runtime.errors import MyxoError, nearest

# Whose error shape an endpoint answers with. ``/inference/v1/generate`` and ``/groups`` have OpenAI's.
House = Literal["openai", "anthropic"]
Status = Literal[400, 401, 403, 404, 405, 408, 409, 410, 413, 422, 429, 500, 503]

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class TurnRefused(MyxoError):
    """A request is not served. Its text is for the client's author.

    Args:
        status: of HTTP. 400: the request; 401: the key; 404: the model, or what the path names; 409: the replicas are behind the version
            that was asked for; 410: the session has ended; 413: too long; 429: too much at once; 503: no replica serves.
        field: the dotted place in the body that it is about; OpenAI's ``param``.
        code: a word that programs may compare; OpenAI's ``code``.
        retry_after_s: after how many seconds the same request may be served; None where it never will.
    """

    def __init__(
        self, status: Status, message: str, *, field: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.status, self.message, self.field, self.code, self.retry_after_s = status, message, field, code, retry_after_s
        super().__init__(f"{field}: {message}" if field else message)

    @property
    def headers(self) -> Mapping[str, str]:
        """Returns the answer's headers. Clients would try 409 and 503 again by themselves, also where that is in vain."""
        if self.retry_after_s is None:
            return {"X-Should-Retry": "false"}
        exact = str(ceil(1000 * self.retry_after_s))
        return {"Retry-After": str(ceil(self.retry_after_s)), "Retry-After-Ms": exact, "X-Should-Retry": "true"}

    def body(self, house: House) -> dict[str, Any]:
        """Returns the answer's body."""
        if house == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": str(self)}, "request_id": None}
        kind = "server_error" if self.status >= 500 else _OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


def unknown_model(model: str, *served: str) -> TurnRefused:
    """Returns the refusal of a request for a model that is not served."""
    known = f"served is {served[0]!r}" if len(served) == 1 else nearest(model[:200], list(served))
    return TurnRefused(404, f"the model {model[:200]!r} does not exist here; {known}", code="model_not_found")


def unknown_conversation(name: str, place: str) -> TurnRefused:
    """Returns the refusal of a name that no conversation of the session has. ``place``: the field or path that gives it."""
    return TurnRefused(404, f"no conversation {name[:200]!r} is stored in this session", field=place, code="conversation_not_found")


def overlong_prompt(length: int, most: int, place: str = "messages") -> TurnRefused:
    """Returns the refusal of a prompt of at least ``length`` tokens where ``most`` fit. ``place``: its field in the body."""
    # Anthropic's clients know it by these words alone, OpenAI's by its code, or by "maximum context length"
    message = f"prompt is too long: {length} tokens > {most} maximum, by the model's maximum context length"
    return TurnRefused(400, message, field=place, code="context_length_exceeded")


# No text of a client's and none that a model samples has half of a surrogate pair: nothing can be taken for a picture
_PICTURE, PICTURE_MARK = "\udcff", re.compile("\udcff([0-9a-f]{64})")


def picture_mark(name: str) -> str:
    """Returns what stands for a picture in a message's content. ``name``: the SHA-256 of what the client sent."""
    return _PICTURE + name


def pictures_in(messages: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the names of the pictures that messages show, in order."""
    return tuple(name for message in messages for name in PICTURE_MARK.findall(message["content"]))


TASK_HEADER = "X-Myxo-Sampling-Of-Task"  # Of an answer: the sampling parameters that were asked otherwise, and stand as the task has them

Finish = Literal["stop", "length", "tool_calls"]  # ``stop``: by itself or at a stop string


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSampling:
    """A request's sampling parameters, within the bounds of `shared.schema.messages.Sampling`; None and empty: nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A field of a request that would constrain what is sampled. ``field``: its place in the body; ``note``: the same in words for the
    model. ``schema``: the answer is JSON that fits it. ``tools``: calls are of these alone. ``required``: at least one call; ``single``: at
    most one."""

    field: str
    note: str
    schema: Mapping[str, Any] | None = None
    tools: tuple[str, ...] = ()
    required: bool = False
    single: bool = False


def json_constraint(field: str, schema: Mapping[str, Any] | None) -> Constraint:
    """Returns the constraint of an answer to JSON that fits a schema; None: to an object."""
    wanted = "a JSON object" if schema is None else f"JSON that fits this schema: {json.dumps(schema, ensure_ascii=False)}"
    return Constraint(field=field, note=f"Answer with nothing but {wanted}", schema={"type": "object"} if schema is None else schema)


def single_call(field: str) -> Constraint:
    """Returns the constraint of an answer to one call."""
    return Constraint(field=field, note="Make at most one tool call in an answer.", single=True)


def call_constraint(field: str, names: Sequence[str], tools: Iterable[Mapping[str, Any]], *, required: bool) -> Constraint:
    """Returns the constraint of an answer to calls of these tools; of any where none is named. Raises TurnRefused where there are none."""
    offered = [tool["function"]["name"] for tool in tools]
    if unknown := [name for name in names if name not in offered]:
        raise TurnRefused(400, f"there is no tool {unknown[0][:200]!r} among tools", field=field, code="invalid_value")
    if not offered:
        raise TurnRefused(400, "a call is required, and tools has none", field=field, code="invalid_value")
    of = f"of {' or '.join(names)}" if names else "of a tool"
    note = f"Answer with a call {of}." if required else f"Make no calls but {of}."
    return Constraint(field=field, note=note, tools=tuple(names), required=required)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTurn:
    """A request for a turn, of chat or of tokens.

    Attributes:
        request_id: by which a turn that is sent twice is known.
        model: the name that the request gives; None where the format does not ask for one.
        stream, stream_usage: answered by events; whether chat completions have the usage in a last one.
        logprobs, token_ids: the answer reports them.
        top_logprobs: of so many of the likeliest tokens at each place the answer reports log-probs.
        min_version: the least weight version that may sample it.
        choice, choices: which of so many answers this is; each is a turn of its own.
        place: the body's field with the conversation or prompt.
        ignored: the request's fields that have no effect here, by name.
        shown: pictures of the prompt as they are stored, once it is made.
    """

    request_id: str
    model: str | None
    sampling: RequestedSampling = RequestedSampling()
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    min_version: int = 0
    choice: int = 0
    choices: int = 1
    place: str
    ignored: tuple[str, ...] = ()
    shown: Mapping[str, Picture] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn(RequestedTurn):
    """A request for the next message of a conversation.

    Attributes:
        tools: functions, each ``{"type": "function", "function": {"name", "description", "parameters"}}``; the last two where given.
        tool_choice: ``none``: what looks like a call stays text.
        constraints: what the answer is to be held to.
        variables: of the chat template, over the run's.
        reasoning: the answer reports it. A client that has seen no reasoning sends none back.
        previous: the stored response that the messages continue, all but the first ``head``; or thread: the name of the conversation that
            they continue and extend. kept: messages that are stored behind the turn ``after``, with the answer.
        pictures: those that the request holds, by their names in messages.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    constraints: tuple[Constraint, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: bool = True
    previous: str = ""
    thread: str = ""
    head: int = 0
    kept: Sequence[Mapping[str, Any]] = ()
    after: str = ""
    place: str = "messages"
    pictures: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def prefill(self) -> str:
        """Returns the beginning of the answer that the request gives: its last message, where that is the assistant's."""
        last = self.messages[-1]
        return str(last["content"]) if last["role"] == "assistant" else ""

    @property
    def setting(self) -> list[Any]:
        """Returns what a prompt depends on beside its messages."""
        return [*self.tools, *([{"variables": self.variables}] if self.variables else [])]

    def answered(self, result: "TurnResult") -> list[Mapping[str, Any]]:
        """Returns the conversation with the answer, which continues the assistant's message where that is the last."""
        said = assistant_message(result)
        if self.messages[-1]["role"] != "assistant":
            return [*self.messages, said]
        return [*self.messages[:-1], {**self.messages[-1], **said, "content": self.prefill + said["content"]}]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTurn(RequestedTurn):
    """A request for the tokens that follow given ones. ``prompt``: int32 [P], or a text; ``further``: other prompts, each of which gets as
    many answers. ``spelled``: the answer is a text."""

    prompt: NDArray[np.int32] | str
    further: tuple[NDArray[np.int32] | str, ...] = ()
    spelled: bool = False
    place: str = "token_ids"


def split(asked: Any) -> list[Any]:
    """Returns a `ChatTurn` or `TokenTurn` for each answer that a request asks for: those of the first prompt come first."""
    prompts = [{"prompt": one} for one in (asked.prompt, *asked.further)] if isinstance(asked, TokenTurn) else [{}]
    answers = enumerate(own for own in prompts for _ in range(asked.choices))
    return [replace(asked, **own, choice=at, request_id=asked.request_id + (f"n{at}" if at else "")) for at, own in answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool call that was read. ``id``: unique within its session. ``arguments``: the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A tool call that could not be read. ``text``: as it was sampled; it is in the content too. ``status``: what is wrong with it."""

    text: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnUsage:
    """Tokens of a turn: of its prompt, ``cached`` of them taken from the engine's prefix cache; and of its completion, of whose reasoning's
    text there are ``reasoning``."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """A turn's tokens. ``prompt``: int32 [P]; ``completion``: int32 [T]; ``logprobs``: float32 [T]; ``texts``: the bytes of each token,
    T of them, where the answer reports log-probs; ``top``: the likeliest tokens at each place, their bytes and log-probs."""

    prompt: NDArray[np.int32]
    completion: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    texts: Sequence[bytes]
    top: Sequence[Sequence[tuple[bytes, float]]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """The result of a turn. ``request_id``, ``model``: as the client gets them. ``created``: seconds since the epoch.
    ``malformed_calls``: what of the content looks like tool calls and is none. ``stop_text``: the stop string that ended it, where one did.
    ``versions``: the oldest and the newest weight version of its tokens. ``tokens``: for answers with log-probs or ids."""

    request_id: str
    model: str
    created: int
    content: str
    finish: Finish
    usage: TurnUsage
    versions: tuple[int, int]
    reasoning: str = ""
    tool_calls: Sequence[CalledTool] = ()
    malformed_calls: Sequence[MalformedCall] = ()
    stop_text: str | None = None
    tokens: TurnTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDelta:
    """The tokens since the delta before: a piece of the reasoning, of the content, or one whole tool call."""

    reasoning: str = ""
    content: str = ""
    tool_call: CalledTool | None = None


def deltas_of(result: TurnResult) -> list[TurnDelta]:
    """Returns a whole result as deltas."""
    texts = [TurnDelta(reasoning=result.reasoning)] if result.reasoning else []
    if result.content:
        texts.append(TurnDelta(content=result.content))
    return texts + [TurnDelta(tool_call=call) for call in result.tool_calls]


def assistant_message(result: TurnResult) -> dict[str, Any]:
    """Returns the message that a result adds to its conversation."""
    return assistant(result.content, result.reasoning, [chat_call(call.id, call.name, call.arguments) for call in result.tool_calls])


def assistant(content: str, reasoning: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns an assistant's message. ``calls``: by `chat_call`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def chat_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Returns a tool call as messages hold it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a function as `ChatTurn.tools` hold it."""
    described = {"description": description, "parameters": parameters}
    return {"type": "function", "function": {"name": name, **{key: value for key, value in described.items() if value is not None}}}


def beside(result: TurnResult) -> dict[str, Any]:
    """Returns what an answer has beside the house's own fields: the weights' versions, and the tool calls that could not be read."""
    return {"weight_versions": {"oldest": result.versions[0], "newest": result.versions[1]}, **malformed(result)}


def malformed(result: TurnResult) -> dict[str, Any]:
    """Returns the answer's field with the tool calls that could not be read; nothing where there are none."""
    calls = [{"text": call.text, "status": call.status} for call in result.malformed_calls]
    return {"malformed_tool_calls": calls} if calls else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """The head of a turn, known when it begins. ``created``: seconds since the epoch. ``prompt``, ``cached``: tokens."""

    request_id: str
    model: str
    created: int
    prompt: int
    cached: int = 0


class TurnEvents(ABC):
    """The events of one answer: `begin`, a `delta` for each piece, then `end`, or `refused` where the turn fails."""

    def __init__(self, turn: Any, start: TurnStart) -> None:  # a `ChatTurn`, or a `TokenTurn` where that is the format's
        self.turn, self.start = turn, start

    @abstractmethod
    def begin(self) -> bytes:
        """Returns the events before the first piece."""

    @abstractmethod
    def delta(self, piece: TurnDelta) -> bytes:
        """Returns the events of a piece."""

    @abstractmethod
    def end(self, result: TurnResult) -> bytes:
        """Returns the last events. ``result``: the whole turn, all of whose text was in deltas."""

    @abstractmethod
    def refused(self, error: TurnRefused) -> bytes:
        """Returns the event that reports why the turn failed: the status of the answer has been sent."""

    def close(self, results: Sequence[TurnResult]) -> bytes:
        """Returns what is behind the events of all answers to a request."""
        return b""

    def ping(self) -> bytes:
        """Returns what keeps the connection alive while there is no event."""
        return b": waiting\n\n"


def started(result: TurnResult) -> TurnStart:
    """Returns the start of a turn that has ended."""
    usage = result.usage
    return TurnStart(request_id=result.request_id, model=result.model, created=result.created, prompt=usage.prompt, cached=usage.cached)


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Returns a server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"
