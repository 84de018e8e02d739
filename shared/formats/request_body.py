"""Bodies of requests, read strictly: each field is known and of its type, or the request is refused by the field's name.

A field that is null counts as not given. Fields that a house's own servers take and that have no effect here are in a model's
``WITHOUT_EFFECT``, and the answer names which of them were given. Those that clients send back of an answer are in ``ECHOED``.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from shared.formats.request import TurnRefused, picture_mark
from shared.runtime.errors import near
from shared.schema.message import LARGEST

MAX_FIELDS = 128  # The most fields of an object that is read
# The most messages or items of a conversation, tools of a request, and parts or calls of a message
MAX_MESSAGES, MAX_TOOLS, MAX_CALLS = 4096, 256, 256
LONGEST_VALUE = 80  # The characters of a place or a name that a refusal repeats
DEEPEST = 64  # Objects and lists in one another, in what a request may hold of any form
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Version = Annotated[int, Field(ge=0, le=LARGEST)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=1 << 30), AfterValidator(lambda count: count or -1)]  # 0 and -1: all tokens, as other servers have it
StopTexts = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=32, fail_fast=True)]
Stops = Annotated[StopTexts, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)]
StopIds = Annotated[list[Annotated[int, Field(ge=0, le=LARGEST)]], Field(max_length=256, fail_fast=True)]
LONGEST_PROMPT = 1 << 22  # Tokens
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=LARGEST)]], Field(min_length=1, max_length=LONGEST_PROMPT, fail_fast=True)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
# The name in a call: it may be any that was sampled, since what was answered may be sent back
CalledName = Annotated[str, Field(max_length=1 << 16)]
LONGEST_ID = 256  # Characters of a call's id
CallId = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]


def shallow(value: Any) -> Any:
    """Returns a value of JSON. Raises ValueError where it is nested too deep."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        level = [one for node in level for one in (node.values() if isinstance(node, dict) else node) if isinstance(one, dict | list)]
        if not level:
            return value
    raise ValueError(f"nested more than {DEEPEST} deep")


AnyObject = Annotated[dict[str, Any], AfterValidator(shallow)]  # An object of any form: a schema


# A call's arguments as text, whether they are the JSON of an object or not: what a model wrote may be sent back, as an object, too
Arguments = Annotated[str, BeforeValidator(lambda one: one if isinstance(one, str) else json.dumps(shallow(one), ensure_ascii=False))]


class RequestFields(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, populate_by_name=True)

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    ECHOED: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any, info: ValidationInfo) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > MAX_FIELDS:
            raise ValueError(f"{len(fields)} fields; expected at most {MAX_FIELDS}")
        given = {name: value for name, value in fields.items() if value is not None and name not in cls.ECHOED}
        if ignored := cls.WITHOUT_EFFECT & given.keys():
            if info.context is not None:
                info.context.update(ignored)
            given = {name: value for name, value in given.items() if name not in ignored}
        return given


class SamplingFields(RequestFields):
    """Sampling parameters, in the words that the formats share beside their house's own."""

    top_k: TopK | None = None
    min_tokens: Version | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    stop_token_ids: StopIds = []
    seed: Version | None = None


class ChatSamplingFields(SamplingFields):
    """The same for the chat formats, by which weights, and with which variables of the chat template."""

    min_version: Version = 0
    chat_template_kwargs: AnyObject = {}


class TextPart(RequestFields):
    """A piece of text in a message."""

    WITHOUT_EFFECT = frozenset({"cache_control"})
    ECHOED = frozenset({"annotations", "citations", "logprobs"})

    type: Literal["text", "input_text", "output_text"]
    text: str


def listed(kind: str, entry: Callable[[str], dict[str, Any]]) -> BeforeValidator:
    """Returns the validator of a list of ``kind`` for which a string may stand: the one ``entry`` that is made of it."""

    def as_list(given: Any) -> Any:
        if isinstance(given, str):
            return [entry(given)]
        if not isinstance(given, list):
            raise ValueError(f"expected a string or a list of {kind}")
        return given

    return BeforeValidator(as_list)


def text_part(text: str) -> dict[str, Any]:
    """Returns a text as a part of a message."""
    return {"type": "text", "text": text}


# Content that is text alone: a string, or parts
Texts = Annotated[list[TextPart], Field(max_length=MAX_CALLS, fail_fast=True), listed("parts", text_part)]


def _from_base64(given: Any) -> bytes:
    try:
        return base64.b64decode(given.encode(), validate=True)
    except (AttributeError, binascii.Error, ValueError):
        raise ValueError("expected base64") from None


def _from_url(given: Any) -> bytes:
    head, comma, encoded = given.partition(",") if isinstance(given, str) else ("", "", "")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise ValueError("expected its data, as data:image/…;base64,…; addresses are not asked for")
    return _from_base64(encoded)


Base64 = Annotated[bytes, BeforeValidator(_from_base64)]
DataUrl = Annotated[bytes, BeforeValidator(_from_url)]


class _ImageUrl(RequestFields):
    WITHOUT_EFFECT = frozenset({"detail"})

    url: DataUrl


class _ImageUrlPart(RequestFields):
    type: Literal["image_url"]
    image_url: _ImageUrl


class _VideoUrlPart(RequestFields):
    type: Literal["video_url"]
    video_url: _ImageUrl


class _InputImagePart(RequestFields):
    WITHOUT_EFFECT = frozenset({"detail"})

    type: Literal["input_image"]
    image_url: DataUrl


class _ImageSource(RequestFields):
    type: Literal["base64"]
    media_type: str
    data: Base64


class _ImageBlock(RequestFields):
    WITHOUT_EFFECT = frozenset({"cache_control"})

    type: Literal["image"]
    source: _ImageSource


class _InputAudio(RequestFields):
    data: Base64
    format: Literal["wav", "mp3", "flac", "ogg"]  # what it is, its own bytes say


class _InputAudioPart(RequestFields):
    type: Literal["input_audio"]
    input_audio: _InputAudio


# As chat completions, responses and Anthropic's messages have pictures and sounds; videos as other servers' clients have them
PicturePart = _ImageUrlPart | _InputImagePart | _ImageBlock | _InputAudioPart | _VideoUrlPart
# Content that may show something: a string, or parts
Parts = Annotated[
    list[Annotated[TextPart | PicturePart, Field(discriminator="type")]],
    Field(max_length=MAX_CALLS, fail_fast=True),
    listed("parts", text_part),
]


def joined(parts: Iterable[TextPart | PicturePart]) -> str:
    """Returns the text of a message: texts in lines of their own, and between them, without a further line, the marks of pictures."""
    found, after_text = "", False
    for part in parts:
        text = part.text if isinstance(part, TextPart) else None
        found += picture_mark(hashlib.sha256(_data(part)).hexdigest()) if text is None else "\n" * after_text + text
        after_text = text is not None
    return found


def _data(part: Any) -> bytes:
    inner = part.source if part.type == "image" else getattr(part, "image_url" if part.type == "input_image" else part.type)
    return inner if isinstance(inner, bytes) else inner.url if part.type.endswith("_url") else inner.data


def pictures_of(messages: Iterable[Any]) -> dict[str, bytes]:
    """Returns the pictures that messages or items show, encoded as they were given, by the names in their marks."""
    found, waiting = dict[str, bytes](), list(messages)
    for one in waiting:  # blocks of results hold further ones
        if isinstance(one, PicturePart):
            found[hashlib.sha256(_data(one)).hexdigest()] = _data(one)
        for field in ("content", "output"):
            waiting += getattr(one, field, ())
    return found


Body = TypeVar("Body", bound=RequestFields)


def read_body(kind: type[Body], body: bytes) -> tuple[Body, tuple[str, ...]]:
    """Returns the request in a body of JSON, and the names of its fields, at any depth, that have no effect. Raises TurnRefused."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TurnRefused(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise TurnRefused(400, "expected a JSON object", code="invalid_json")
    try:
        read = kind.model_validate(fields, context=(ignored := set[str]()))
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_input=False, include_context=False, include_url=False)[0], fields) from None
    return read, tuple(sorted(ignored))


def _refusal(kind: type[RequestFields], error: Mapping[str, Any], body: Mapping[str, Any]) -> TurnRefused:
    named = error["type"] in ("missing", "extra_forbidden")
    place, message = _place(error["loc"], body, named), str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        name, outermost = str(error["loc"][-1]), len(error["loc"]) == 1
        meant = near(name, kind.model_fields) if outermost and len(name) <= LONGEST_VALUE else None
        return TurnRefused(400, "unknown parameter" + (f"; did you mean {meant}?" if meant else ""), field=place, code="unknown_parameter")
    return TurnRefused(400, message, field=place or None, code="missing_parameter" if error["type"] == "missing" else "invalid_value")


def _place(steps: Sequence[str | int], body: Any, named: bool) -> str:
    """Returns the place in the body, as ``messages[0].content``. Among the steps are names of pydantic's own, which the body lacks.
    ``named``: the last step is the name of a field, whether the body has it or not."""
    place = ""
    for index, step in enumerate(steps):
        inside = step in body if isinstance(body, dict) else isinstance(body, list) and isinstance(step, int) and step < len(body)
        if inside:
            body = body[step]
        if inside or (named and index == len(steps) - 1):
            place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else str(step)
    return place[:LONGEST_VALUE]


def check_tool_results(messages: Iterable[Mapping[str, Any]], field: str) -> None:
    """Raises TurnRefused where a result follows no call of its id, or a call is followed by something other than the calls' results.
    ``field``: the body's field that holds the conversation."""
    open_calls: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                raise _misplaced(field, f"a tool's result for {message['tool_call_id']!r} follows no call of that id")
            open_calls.remove(message["tool_call_id"])
        else:
            _check_all_answered(open_calls, field)
            open_calls = [call["id"] for call in message.get("tool_calls", ())]
            if len(set(open_calls)) < len(open_calls):
                raise _misplaced(field, "two tool calls of one message have the same id")
    _check_all_answered(open_calls, field)


def _check_all_answered(open_calls: list[str], field: str) -> None:
    if open_calls:
        raise _misplaced(field, f"the tool call {open_calls[0]!r} is not followed by its result")


def _misplaced(field: str, message: str) -> TurnRefused:
    return TurnRefused(400, message[:500], field=field, code="invalid_value")
