"""A turn as the gateway knows it, whatever the format that it came in, and what became of it.

A *conversation* is a list of messages in OpenAI's chat form with nothing left open: ``role`` is system, user, assistant or tool;
``content`` is a string; an assistant's ``reasoning_content`` and ``tool_calls`` are there where they are not empty, and the arguments of a
call are JSON text. What a client sends back of an answer parses to `assistant_message` of its result: in OpenAI's formats to the very same,
with the reasoning where the client keeps it; in Anthropic's with the arguments written anew, since they travel as an object.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Finish = Literal["stop", "length", "tool_calls", "abort"]
"""``stop``: by itself or at a stop string. ``abort``: the session ended meanwhile, and no answer can be made of the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSampling:
    """What a request says of how tokens are drawn, within the bounds of `shared.schema.messages.Sampling`; None and empty: nothing."""

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
class ChatTurn:
    """A request for the next message of a conversation.

    Attributes:
        request_id: by which a turn that is sent twice is known.
        model: the name that the request gives; None where the format does not ask for one.
        tools: functions, each ``{"type": "function", "function": {"name", "description", "parameters"}}``; the last two where given.
        tool_choice: ``none``: what looks like a call stays text.
        stream, stream_usage: answered by events; whether chat completions tell the usage in a last one.
        logprobs, token_ids, reasoning: the answer tells them. A client that has seen no reasoning sends none back.
        min_version: the least weight version that may draw it.
        place: the body's field with the conversation.
        ignored: the request's fields that have no effect here, by name.
    """

    request_id: str
    model: str | None
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    sampling: RequestedSampling = RequestedSampling()
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    reasoning: bool = True
    min_version: int = 0
    place: str = "messages"
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTurn:
    """A request for the tokens that follow given ones. ``prompt``: int32 [P]; the rest as in `ChatTurn`."""

    request_id: str
    model: str | None
    prompt: NDArray[np.int32]
    sampling: RequestedSampling = RequestedSampling()
    min_version: int = 0
    place: str = "token_ids"
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool call that was read. ``id``: unique within its session. ``arguments``: the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A tool call that could not be read. ``text``: as it was drawn; it is in the content too. ``status``: what is wrong with it."""

    text: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnUsage:
    """Tokens of a turn: of its prompt, ``cached`` of them taken from the engine's prefix cache, and of its completion."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """A turn's tokens. ``prompt``: int32 [P]; ``completion``: int32 [T]; ``logprobs``: float32 [T]; ``texts``: of each token, T strings,
    where the answer tells log-probs."""

    prompt: NDArray[np.int32]
    completion: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    texts: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What became of a turn.

    Attributes:
        request_id, model: as they are told to the client.
        created: seconds since the epoch.
        malformed_calls: what of the content looks like tool calls and is none.
        stop_text: the stop string that ended it, where one did.
        versions: the oldest and the newest weight version of its tokens.
        tokens: for answers that tell log-probs or ids.
    """

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
    """What has been drawn since the delta before: a piece of the reasoning, of the content, or one whole tool call."""

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
