"""Anthropic's messages: ``POST /v1/messages`` and ``/v1/messages/count_tokens``.

Thinking is in the answer where ``thinking`` asks for it, as there; whether the model thinks is its chat template's affair. Beside
Anthropic's own fields those of `ChatSamplingFields`, by the client's ``extra_body``.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from shared.formats import request as wire
from shared.formats import request_body as fields
from shared.formats.openai_chat import sampling
from shared.formats.request_body import RequestFields, read_body

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _ThinkingBlock(RequestFields):
    WITHOUT_EFFECT = frozenset({"cache_control"})
    ECHOED = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class _RedactedThinkingBlock(RequestFields):
    ECHOED = frozenset({"data"})

    type: Literal["redacted_thinking"]


class _ToolUseBlock(RequestFields):
    WITHOUT_EFFECT = frozenset({"cache_control"})
    ECHOED = frozenset({"caller", "toolset_name"})

    type: Literal["tool_use"]
    id: fields.CallId
    name: fields.CalledName
    input: fields.Arguments = "{}"


class _ToolResultBlock(RequestFields):
    WITHOUT_EFFECT = frozenset({"cache_control", "is_error"})
    ECHOED = frozenset({"toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: fields.CallId
    content: fields.Parts = []


_UserBlock = Annotated[fields.TextPart | fields.PicturePart | _ToolResultBlock, Field(discriminator="type")]
_AssistantBlock = Annotated[fields.TextPart | _ThinkingBlock | _RedactedThinkingBlock | _ToolUseBlock, Field(discriminator="type")]


class _UserMessage(RequestFields):
    role: Literal["user"]
    content: Annotated[
        list[_UserBlock], Field(min_length=1, max_length=fields.MAX_CALLS, fail_fast=True), fields.listed("blocks", fields.text_part)
    ]

    def chat(self) -> list[dict[str, Any]]:
        """Returns the results of tools, each as a message of its own, and what the user says after them."""
        results = [block for block in self.content if isinstance(block, _ToolResultBlock)]
        texts = [block for block in self.content if not isinstance(block, _ToolResultBlock)]
        if any(not isinstance(block, _ToolResultBlock) for block in self.content[: len(results)]):
            raise wire.TurnRefused(
                400, "a tool_result block stands behind another block of its message", field="messages", code="invalid_value"
            )
        messages = [{"role": "tool", "tool_call_id": result.tool_use_id, "content": fields.joined(result.content)} for result in results]
        return messages + ([{"role": "user", "content": fields.joined(texts)}] if texts else [])


class _AssistantMessage(RequestFields):
    role: Literal["assistant"]
    content: Annotated[list[_AssistantBlock], Field(max_length=fields.MAX_CALLS, fail_fast=True), fields.listed("blocks", fields.text_part)]

    def chat(self) -> list[dict[str, Any]]:
        thinking = "\n".join(block.thinking for block in self.content if isinstance(block, _ThinkingBlock))
        texts = [block for block in self.content if isinstance(block, fields.TextPart)]
        calls = [wire.chat_call(block.id, block.name, block.input) for block in self.content if isinstance(block, _ToolUseBlock)]
        return [wire.assistant(fields.joined(texts), thinking, calls)]


class _SystemMessage(RequestFields):
    role: Literal["system"]
    content: fields.Texts

    def chat(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": fields.joined(self.content)}]


class _Tool(RequestFields):
    WITHOUT_EFFECT = frozenset({"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples", "strict"})

    type: Literal["custom"] = "custom"
    name: fields.ToolName
    description: str | None = None
    input_schema: fields.AnyObject


class _ToolChoice(RequestFields):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Thinking(RequestFields):
    WITHOUT_EFFECT = frozenset({"budget_tokens"})

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] = "summarized"


class _OutputFormat(RequestFields):
    type: Literal["json_schema"]
    definition: fields.AnyObject = Field(alias="schema")


class _OutputConfig(RequestFields):
    WITHOUT_EFFECT = frozenset({"effort"})

    format: _OutputFormat | None = None


_Message = Annotated[_UserMessage | _AssistantMessage | _SystemMessage, Field(discriminator="role")]


class _CountBody(fields.ChatSamplingFields):
    WITHOUT_EFFECT = frozenset({"cache_control", "context_management", "metadata", "service_tier", "inference_geo", "speed"})

    model: str
    messages: Annotated[list[_Message], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]
    system: fields.Texts = []
    tools: Annotated[list[_Tool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] = []
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None


class _MessageBody(_CountBody):
    max_tokens: fields.Positive
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: fields.TopP | None = None
    stop_sequences: fields.StopTexts = []
    stream: bool = False


def parse(body: bytes, request_id: str) -> wire.ChatTurn:
    """Returns the turn that a body asks for. Raises TurnRefused."""
    asked, ignored = read_body(_MessageBody, body)
    return wire.ChatTurn(
        request_id=request_id,
        **_conversation(asked),
        sampling=sampling(asked, asked.max_tokens, asked.temperature, asked.top_p, asked.stop_sequences),
        stream=asked.stream,
        reasoning=asked.thinking is not None and asked.thinking.type != "disabled" and asked.thinking.display != "omitted",
        min_version=asked.min_version,
        ignored=ignored,
    )


def parse_count(body: bytes, request_id: str) -> wire.ChatTurn:
    """Returns the turn whose prompt is to be counted. Raises TurnRefused."""
    asked, ignored = read_body(_CountBody, body)
    sampled = asked.model_fields_set & {"min_version", *fields.SamplingFields.model_fields}
    return wire.ChatTurn(request_id=request_id, ignored=tuple(sorted({*ignored, *sampled})), **_conversation(asked))


def _conversation(asked: _CountBody) -> dict[str, Any]:
    system = [{"role": "system", "content": fields.joined(asked.system)}] if asked.system else []
    messages = system + [one for message in asked.messages for one in message.chat()]
    fields.check_tool_results(messages, "messages")
    tools = [wire.function_tool(tool.name, tool.description, tool.input_schema) for tool in asked.tools]
    choice = asked.tool_choice or _ToolChoice(type="auto")
    return {
        "model": asked.model,
        "variables": asked.chat_template_kwargs,
        "messages": messages,
        "pictures": fields.pictures_of(asked.messages),
        "tools": tools,
        "tool_choice": "none" if choice.type == "none" else "auto",
        "constraints": tuple(_constraints(asked, choice, tools)),
    }


def _constraints(asked: _CountBody, choice: _ToolChoice, tools: list[dict[str, Any]]) -> Iterator[wire.Constraint]:
    if choice.type in ("any", "tool"):
        yield wire.call_constraint("tool_choice", [choice.name] if choice.type == "tool" else [], tools, required=True)
    if choice.disable_parallel_tool_use and tools and choice.type != "none":
        yield wire.single_call("tool_choice.disable_parallel_tool_use")
    if asked.output_format is not None:
        yield wire.json_constraint("output_format", asked.output_format.definition)
    if asked.output_config is not None and asked.output_config.format is not None:
        yield wire.json_constraint("output_config.format", asked.output_config.format.definition)


def answer(turn: wire.ChatTurn, result: wire.TurnResult) -> dict[str, Any]:
    """Returns the message."""
    extra = wire.beside(result)
    content: list[dict[str, Any]] = []
    if result.reasoning and turn.reasoning:
        content.append({"type": "thinking", "thinking": result.reasoning, "signature": _signature(result.reasoning)})
    if result.content:
        content.append({"type": "text", "text": result.content, "citations": None})
    content += [_tool_use(call) | {"input": json.loads(call.arguments)} for call in result.tool_calls]
    return _head(wire.started(result)) | {"content": content, "usage": _usage(result.usage), **_stopped(result), **extra}


class MessageEvents(wire.TurnEvents):
    """The events of a streamed message."""

    def __init__(self, turn: wire.ChatTurn, start: wire.TurnStart) -> None:
        super().__init__(turn, start)
        self._blocks, self._thought = 0, ""
        self._open: Literal["", "thinking", "text"] = ""

    def begin(self) -> bytes:
        usage = _usage(wire.TurnUsage(prompt=self.start.prompt, completion=0, cached=self.start.cached))
        return _event("message_start", message=_head(self.start) | {"usage": usage})

    def delta(self, piece: wire.TurnDelta) -> bytes:
        events = b""
        if piece.reasoning and self.turn.reasoning:
            events += self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thought += piece.reasoning
            events += self._in_block(type="thinking_delta", thinking=piece.reasoning)
        if piece.content:
            events += self._opened("text", {"type": "text", "text": "", "citations": None})
            events += self._in_block(type="text_delta", text=piece.content)
        if piece.tool_call is not None:
            events += self._close() + self._start(_tool_use(piece.tool_call))
            events += self._in_block(type="input_json_delta", partial_json=piece.tool_call.arguments) + self._stop()
        return events

    def end(self, result: wire.TurnResult) -> bytes:
        delta = _event("message_delta", delta=_stopped(result), usage=_usage(result.usage), **wire.beside(result))
        return self._close() + delta + _event("message_stop")

    def refused(self, error: wire.TurnRefused) -> bytes:
        return wire.event(error.body("anthropic"), "error")

    def ping(self) -> bytes:
        return _event("ping")

    def _opened(self, kind: Literal["thinking", "text"], block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        events = self._close() + self._start(block)
        self._open = kind
        return events

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signature = self._in_block(type="signature_delta", signature=_signature(self._thought)) if self._open == "thinking" else b""
        self._open = ""
        return signature + self._stop()

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _in_block(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _stop(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return wire.event({"type": kind, **fields}, kind)


def _head(start: wire.TurnStart) -> dict[str, Any]:
    message = {"id": start.request_id, "type": "message", "role": "assistant", "model": start.model, "content": []}
    return message | {"stop_reason": None, "stop_sequence": None}


def _stopped(result: wire.TurnResult) -> dict[str, Any]:
    if result.finish == "stop" and result.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": result.stop_text}
    return {"stop_reason": STOP_REASONS[result.finish], "stop_sequence": None}


def _signature(text: str) -> str:
    """Returns a digest: clients drop thinking that has no signature. It is not looked at when it comes back."""
    return hashlib.sha256(text.encode()).hexdigest()


def _tool_use(call: wire.CalledTool) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _usage(usage: wire.TurnUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }
