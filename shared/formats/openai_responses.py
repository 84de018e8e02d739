"""OpenAI's responses: ``POST /v1/responses``.

The items of ``input`` are the whole conversation, or continue one that the session's turns store. What is one message of an
assistant here is a row of items there: its reasoning, its text, its calls.
"""

import re
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from shared.formats import request as wire
from shared.formats import request_body as fields
from shared.formats.openai_chat import OpenAIBody, TextFormat, check_served, sampling, token_logprobs
from shared.formats.request_body import RequestFields, read_body

LOGPROBS = "message.output_text.logprobs"  # The entry of ``include`` that asks for log-probs


class _MessageItem(RequestFields):
    ECHOED = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: fields.Parts

    @model_validator(mode="after")
    def _shown_by_users(self) -> "_MessageItem":
        if self.role != "user" and fields.pictures_of([self]):
            raise ValueError("expected text: pictures are taken of users and tools")
        return self


class _CallItem(RequestFields):
    ECHOED = frozenset({"id", "status"})

    type: Literal["function_call"]
    call_id: fields.CallId
    namespace: fields.CalledName = ""
    name: fields.CalledName
    arguments: fields.Arguments = "{}"


class _CallOutputItem(RequestFields):
    ECHOED = frozenset({"id", "status"})

    type: Literal["function_call_output"]
    call_id: fields.CallId
    output: fields.Parts


class _ReasoningText(RequestFields):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _ReasoningItem(RequestFields):
    ECHOED = frozenset({"id", "status", "summary", "encrypted_content"})

    type: Literal["reasoning"]
    content: Annotated[list[_ReasoningText], Field(max_length=fields.MAX_MESSAGES, fail_fast=True)] = []


class _FunctionTool(RequestFields):
    WITHOUT_EFFECT = frozenset({"strict"})

    type: Literal["function"]
    name: fields.ToolName
    description: str | None = None
    parameters: fields.AnyObject | None = None


class _TextOptions(RequestFields):
    WITHOUT_EFFECT = frozenset({"verbosity"})

    format: TextFormat | None = None


class _StreamOptions(RequestFields):
    WITHOUT_EFFECT = frozenset({"include_obfuscation"})


NAMESPACE = "::"  # Between the namespace and the name of a function, as the model has it
KINDS, LONGEST_KIND = 16, 40  # The most types of tools without effect, and the characters of one: they are named in a header


def _functions(given: Any, info: ValidationInfo) -> Any:
    """Returns the functions among tools, those in namespaces by both names; of the others the types are noted as without effect."""
    found, others = list[Any](), set[str]()
    for tool in given if isinstance(given, list) else ():
        kind = tool.get("type", "") if isinstance(tool, dict) else "function"
        if kind == "namespace" and isinstance(inner := tool.get("tools"), list) and isinstance(name := tool.get("name"), str):
            for one in inner:
                named = isinstance(one, dict) and bool(one.get("name"))
                found.append(one | {"name": f"{name}{NAMESPACE}{one['name']}"} if named else one)
        elif kind in ("function", "namespace") or not isinstance(kind, str):
            found.append(tool)
        else:
            others.add("tools." + re.sub(r"[^A-Za-z0-9_]", "_", kind)[:LONGEST_KIND])
    if len(others) > KINDS:
        raise ValueError(f"{len(others)} types beside function; expected at most {KINDS}")
    if info.context is not None:
        info.context.update(others)
    return found if isinstance(given, list) else given


ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _kind(item: Any) -> str:
    return str(item.get("type") or "message") if isinstance(item, dict) else str(getattr(item, "type", ""))


_Item = Annotated[
    Annotated[_MessageItem, Tag("message")]
    | Annotated[_CallItem, Tag("function_call")]
    | Annotated[_CallOutputItem, Tag("function_call_output")]
    | Annotated[_ReasoningItem, Tag("reasoning")],
    Discriminator(_kind, custom_error_type="unknown_item", custom_error_message="expected an item of type " + ", ".join(ITEMS)),
]


_ITEMS = fields.listed("items", lambda text: {"type": "message", "role": "user", "content": text})


class _ConversationId(RequestFields):
    id: Annotated[str, Field(min_length=1, max_length=64)]


class _ItemsBody(RequestFields):
    WITHOUT_EFFECT = frozenset({"metadata"})

    items: Annotated[list[_Item], Field(max_length=fields.MAX_MESSAGES, fail_fast=True), _ITEMS] = []


class _ResponseBody(OpenAIBody):
    WITHOUT_EFFECT = OpenAIBody.WITHOUT_EFFECT - {"store"} | {"client_metadata", "max_tool_calls", "reasoning"}

    input: Annotated[list[_Item], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True), _ITEMS]
    instructions: str = ""
    max_output_tokens: fields.Positive | None = None
    stream_options: _StreamOptions | None = None
    tools: Annotated[list[_FunctionTool], Field(max_length=fields.MAX_TOOLS, fail_fast=True), BeforeValidator(_functions)] = []
    text: _TextOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    include: Annotated[list[str], Field(max_length=32, fail_fast=True)] = []
    background: Literal[False] = False
    previous_response_id: Annotated[str, Field(min_length=1)] | None = None
    conversation: Annotated[_ConversationId, BeforeValidator(lambda given: {"id": given} if isinstance(given, str) else given)] | None = (
        None
    )
    store: bool = True


def parse(body: bytes, request_id: str) -> wire.ChatTurn:
    """Returns the turn that a body asks for. Raises TurnRefused."""
    asked, ignored = read_body(_ResponseBody, body)
    thread = asked.conversation.id if asked.conversation else ""
    check_served((bool(thread and asked.previous_response_id), "conversation", "expected either previous_response_id or this"))
    instructions = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if not (said := _messages(asked.input)):
        raise wire.TurnRefused(400, "expected a message", field="input", code="invalid_value")
    messages = instructions + said
    if asked.previous_response_id is None:
        fields.check_tool_results(messages, "input")
    used = asked.tool_use([wire.function_tool(tool.name, tool.description, tool.parameters) for tool in asked.tools])
    used["constraints"] += tuple(asked.text.format.constraint("text.format")) if asked.text and asked.text.format else ()
    return wire.ChatTurn(
        request_id=request_id,
        model=asked.model,
        messages=messages,
        variables=asked.chat_template_kwargs,
        **used,
        sampling=sampling(asked, asked.max_output_tokens, asked.temperature, asked.top_p, ()),
        stream=asked.stream,
        logprobs=LOGPROBS in asked.include or asked.top_logprobs > 0,
        top_logprobs=asked.top_logprobs,
        min_version=asked.min_version,
        previous=asked.previous_response_id or "",
        thread=thread,
        head=len(instructions),
        kept=said if asked.store else (),
        place="input",
        ignored=ignored if set(asked.include) <= {LOGPROBS} else (*ignored, "include"),
        pictures=fields.pictures_of(asked.input),
    )


def parse_items(body: bytes) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the items in a body of ``/v1/conversations``, and their messages. Raises TurnRefused."""
    items = read_body(_ItemsBody, body or b"{}")[0].items
    check_served((bool(fields.pictures_of(items)), "items", "pictures are stored with the request that shows them, as its input"))
    return [{"id": uuid.uuid4().hex, "status": "completed", **item.model_dump()} for item in items], _messages(items)


def _messages(items: Iterable[_MessageItem | _CallItem | _CallOutputItem | _ReasoningItem]) -> list[dict[str, Any]]:
    """Returns the conversation of the items: reasoning, text and calls that follow one another, in this order, are one message."""
    messages: list[dict[str, Any]] = []
    reasoning, text, calls = "", None, list[dict[str, Any]]()

    def end_assistant() -> None:
        nonlocal reasoning, text, calls
        if reasoning or text is not None or calls:
            messages.append(wire.assistant(text or "", reasoning, calls))
        reasoning, text, calls = "", None, []

    for item in items:
        if isinstance(item, _CallItem):
            calls.append(wire.chat_call(item.call_id, f"{item.namespace}{NAMESPACE if item.namespace else ''}{item.name}", item.arguments))
        elif isinstance(item, _ReasoningItem):
            end_assistant()
            reasoning = "\n".join(part.text for part in item.content)
        elif isinstance(item, _MessageItem) and item.role == "assistant":
            if text is not None or calls:
                end_assistant()
            text = fields.joined(item.content)
        else:
            end_assistant()
            if isinstance(item, _CallOutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": fields.joined(item.output)})
            else:
                messages.append({"role": "user" if item.role == "user" else "system", "content": fields.joined(item.content)})
    end_assistant()
    return messages


def answer(turn: wire.ChatTurn, result: wire.TurnResult) -> dict[str, Any]:
    """Returns the response."""
    extra = wire.beside(result)
    cut = result.finish == "length"
    output = [_reasoning_item(result.request_id, result.reasoning)] if result.reasoning else []
    if result.content or not result.tool_calls:
        output.append(_message_item(result.request_id, result.content, "incomplete" if cut else "completed", _logprobs(turn, result)))
    output += [_call_item(call) for call in result.tool_calls]
    head = _head(turn, result.request_id, result.created, result.model, "incomplete" if cut else "completed")
    return head | {
        "output": output,
        "usage": _usage(result.usage),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        **extra,
    }


class ResponseEvents(wire.TurnEvents):
    """The events of a streamed response."""

    def __init__(self, turn: wire.ChatTurn, start: wire.TurnStart) -> None:
        super().__init__(turn, start)
        self._number, self._items = 0, 0
        self._open: Literal["", "reasoning", "message"] = ""
        self._text = ""

    def begin(self) -> bytes:
        head = self._response("in_progress")
        return self._event("response.created", response=head) + self._event("response.in_progress", response=head)

    def delta(self, piece: wire.TurnDelta) -> bytes:
        events = b""
        if piece.reasoning:
            events += self._piece("reasoning", piece.reasoning)
        if piece.content:
            events += self._piece("message", piece.content)
        if piece.tool_call is not None:
            events += self._close() + self._call(piece.tool_call)
        return events

    def end(self, result: wire.TurnResult) -> bytes:
        events = b""
        if not result.content and not result.tool_calls:
            events += self._piece("message", "")
        whole = answer(self.turn, result)
        events += self._close(result)
        return events + self._event(f"response.{whole['status']}", response=whole)

    def refused(self, error: wire.TurnRefused) -> bytes:
        said = {"code": error.code or "server_error", "message": str(error)}
        return self._event("error", param=error.field, **said) + self._event(
            "response.failed", response=self._response("failed") | {"error": said}
        )

    def _piece(self, kind: Literal["reasoning", "message"], text: str) -> bytes:
        events = b""
        if self._open != kind:
            events += self._close() + self._added(kind)
        self._text += text
        if kind == "reasoning":
            return events + self._in_item("response.reasoning_text.delta", delta=text)
        return events + self._in_item("response.output_text.delta", delta=text, logprobs=[])

    def _added(self, kind: Literal["reasoning", "message"]) -> bytes:
        self._open, self._text = kind, ""
        item = self._item("in_progress") | {"content": []}
        events = self._event("response.output_item.added", output_index=self._items, item=item)
        return events + self._in_item("response.content_part.added", part=self._part())

    def _close(self, result: wire.TurnResult | None = None) -> bytes:
        if not self._open:
            return b""
        logprobs = [] if result is None else _logprobs(self.turn, result)
        if self._open == "reasoning":
            events = self._in_item("response.reasoning_text.done", text=self._text)
        else:
            events = self._in_item("response.output_text.done", text=self._text, logprobs=logprobs)
        events += self._in_item("response.content_part.done", part=self._part(logprobs))
        cut = result is not None and result.finish == "length" and self._open == "message"
        item = self._item("incomplete" if cut else "completed", logprobs)
        events += self._event("response.output_item.done", output_index=self._items, item=item)
        self._open, self._items = "", self._items + 1
        return events

    def _call(self, call: wire.CalledTool) -> bytes:
        item, place = _call_item(call), {"output_index": self._items, "item_id": _call_item(call)["id"]}
        events = self._event("response.output_item.added", output_index=self._items, item=item | {"arguments": "", "status": "in_progress"})
        events += self._event("response.function_call_arguments.delta", delta=call.arguments, **place)
        events += self._event("response.function_call_arguments.done", name=item["name"], arguments=call.arguments, **place)
        events += self._event("response.output_item.done", output_index=self._items, item=item)
        self._items += 1
        return events

    def _item(self, status: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
        if self._open == "reasoning":
            return _reasoning_item(self.start.request_id, self._text, status)
        return _message_item(self.start.request_id, self._text, status, logprobs or [])

    def _part(self, logprobs: list[Any] | None = None) -> dict[str, Any]:
        part: dict[str, Any] = self._item("completed", logprobs)["content"][0]
        return part

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item("")["id"], output_index=self._items, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return wire.event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _response(self, status: str) -> dict[str, Any]:
        return _head(self.turn, self.start.request_id, self.start.created, self.start.model, status)


_TOOL = {"type": "function", "description": None, "parameters": None, "strict": False}


def _head(turn: wire.ChatTurn, request_id: str, created: int, model: str, status: str) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "response",
        "created_at": created,
        "status": status,
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tools": [{**_TOOL, **tool["function"]} for tool in turn.tools],
        "tool_choice": turn.tool_choice,
        "temperature": turn.sampling.temperature,
        "top_p": turn.sampling.top_p,
        "max_output_tokens": turn.sampling.max_tokens,
        "previous_response_id": turn.previous or None,
        "conversation": {"id": turn.thread} if turn.thread else None,
        "store": bool(turn.kept),
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": None,
    }


def _reasoning_item(request_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{request_id}", "type": "reasoning", "summary": [], "content": content, "status": status}


def _message_item(request_id: str, text: str, status: str, logprobs: list[Any]) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
    return {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _call_item(call: wire.CalledTool) -> dict[str, Any]:
    namespace, _, name = call.name.rpartition(NAMESPACE)
    named = {"call_id": call.id, "name": name, "arguments": call.arguments, **({"namespace": namespace} if namespace else {})}
    return {"id": f"fc_{call.id}", "type": "function_call", "status": "completed", **named}


def _logprobs(turn: wire.ChatTurn, result: wire.TurnResult) -> list[dict[str, Any]]:
    return token_logprobs(result.tokens) if turn.logprobs and result.tokens is not None else []


def _usage(usage: wire.TurnUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
