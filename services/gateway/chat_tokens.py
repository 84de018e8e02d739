"""Messages to token ids and back, by the `renderers` package. Pure but for reading the tokenizer.

A family's renderer is taken where it renders probes exactly as the model's own chat template does; it can carry a conversation on without
rendering again what was sampled. Where none does, the template itself renders every turn anew, and whether the result continues what was
sampled is seen by comparing ids.
"""

import functools
import itertools
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from shared.data.control_tokens import ControlTokens
from shared.data.media import empty_part
from shared.data.tokenizer import Tokenizer, in_call_form
from shared.formats.request import PICTURE_MARK, ChatTurn, TurnRefused
from shared.formats.request_body import shallow, text_part
from shared.runtime.errors import ConfigError
from shared.sessions.session import Turn

# Of texts whose ids are remembered, all together: clients send a conversation whole each time, and renderers encode message by message
CACHED_CHARACTERS = 16 << 20


class EncodedTexts:
    """The ids of texts; of those that were asked for last they are remembered."""

    def __init__(self, tokenizer: Tokenizer | ControlTokens, most: int = CACHED_CHARACTERS) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._ids: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._lock = threading.Lock()
        self.characters = 0

    def of(self, text: str) -> NDArray[np.int32]:
        """Returns a text's ids: int32 [T], not to be changed."""
        with self._lock:  # long prompts are made in threads of their own
            if (found := self._ids.get(text)) is not None:
                self._ids.move_to_end(text)
                return found
        ids = self._tokenizer.encode(text)
        with self._lock:
            if text not in self._ids:
                self.characters += len(text)
            self._ids[text] = ids
            while self.characters > self._most:
                self.characters -= len(self._ids.popitem(last=False)[0])
        return ids


class RendererTokenizer:
    """``variables``: of the run for the chat template. The methods' names and arguments are those of Hugging Face's tokenizers."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any], control: ControlTokens, encoded: EncodedTexts) -> None:
        self._tokenizer, self._variables, self._control, self._encoded = tokenizer, dict(variables), control, encoded
        self.eos_token_id = tokenizer.eos_id
        self.all_special_tokens = tokenizer.skipped_tokens

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self._encoded.of(text).tolist()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Returns the ids of the rendered messages; with ``continue_final_message`` up to the end of the last one's content. Raises
        ConfigError where the template refuses them."""
        for option in ("tokenize", "return_dict"):
            variables.pop(option, None)
        given = {**self._variables, **variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
        content, end = messages[-1]["content"], secrets.token_hex(12) if continue_final_message else ""
        if end:  # what the template puts behind the message may hold its text, too
            messages = [*messages[:-1], {**messages[-1], "content": content + end}]
        text = self._tokenizer.render(in_call_form(self._tokenizer, messages, given), given)
        if end:
            text, shown, _ = text.rpartition(end)
            if not shown or not content.strip():
                raise ConfigError("messages", content, "the last message, the assistant's, has no text to continue that the template shows")
        return self._control.encode(text).tolist()


Messages = Sequence[Mapping[str, Any]]

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]},
    },
}
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


def _said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_BRIEF, _ASKED = _said("system", "Be brief."), _said("user", "What is 1 + 2?")
# Conversations, with tools, that a family's renderer and the model's template must render alike
PROBES: tuple[tuple[Messages, Messages], ...] = (
    ([_ASKED], ()),
    ([_BRIEF, _said("user", "Hello"), _said("assistant", "Hi."), _said("user", "And now?")], ()),
    ([_BRIEF, _ASKED, _said("assistant", "", tool_calls=[CALL]), _said("tool", "3", tool_call_id="call_0", name="add")], (TOOL,)),
)
# A conversation with two calls in a message, which a few renderers (DeepSeek's) separate otherwise than their template
PARALLEL: tuple[Messages, Messages] = (
    [
        _ASKED,
        _said("assistant", "", tool_calls=[CALL, {**CALL, "id": "call_1"}]),
        *(_said("tool", "3", tool_call_id=name, name="add") for name in ("call_0", "call_1")),
    ],
    (TOOL,),
)
# Calls as JSON between marks, as most templates have them
JSON_CALL = re.compile(r'(<[^<>]+>\s*\{"name": ")add(", "arguments": )\{"a": 1, "b": 2\}(\}\s*</[^<>]+>)')
THINKING, THOUGHT_END = "<think>", "</think>"
# Names that requests give no template a value for; the most chat forms with variables of requests that are kept
RESERVED, MOST_VARIED = frozenset({"messages", "tools", "documents", "chat_template", "add_generation_prompt"}), 256
# What a renderer raises for what it cannot read
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError)
# Parsers of tool calls for templates of no known family, by what stands in them
PARSERS = {"<function=": "qwen3.5", "<tool_call>": "qwen3"}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as it was sampled. ``status``: ``ok``, or what is wrong with ``text``. ``arguments``: an object's fields, or text."""

    text: str
    status: str
    name: str = ""
    arguments: Any = None
    id: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok" and bool(self.name)


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A completion as a message."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]


THOUGHT = "<think>\n a \n</think>\n\nb"  # A completion by which is seen whether a family strips reasoning


class ChatTokens:
    """The chat form of one model.

    Args:
        model: its checkpoint directory, or tokenizer. variables: of the run for the chat template.
        control_tokens: what those are that clients' texts spell: ``text``, or control tokens (``as_written``). encoded: ids that are
            remembered, also for others. kind: of the parts of messages that show something, as in `MediaReader`.

    Attributes:
        family: the renderer's name; ``default``: the model's own template. stop_ids: tokens that end a turn.
        shows_tools: whether a prompt shows the model the tools that it is given. shows_system: whether it may have a system's message.
        streams_text: the beginning of a completion can be read before its end: reasoning comes first, and is one piece.
        plain_markers: most markers are nothing but left out.
        picture_texts: what the template writes around the number of a picture, which most leave out: one piece then; none: it shows none,
            or otherwise than in the middle of a text.
        added_ids: tokens that are no plain text. byte_ids: those that are a byte each. letter: the tokens of `LETTER`.
    """

    LETTER = "x"

    def __init__(
        self,
        model: Path | Tokenizer,
        variables: Mapping[str, Any],
        control_tokens: Literal["text", "as_written"] = "text",
        encoded: EncodedTexts | None = None,
        kind: str = "image",
    ) -> None:
        from renderers import DefaultRendererConfig, create_renderer  # it takes seconds, and only gateways have the package

        self.tokenizer, self._kind = model if isinstance(model, Tokenizer) else Tokenizer(model), kind
        self._control_tokens: Literal["text", "as_written"] = control_tokens
        self._varied = functools.lru_cache(MOST_VARIED)(self._variant)
        self.has_template = self.tokenizer.has_chat_template
        self._control = self.tokenizer.control_tokens[control_tokens]
        self._encoded = encoded or EncodedTexts(self._control)
        adapter = RendererTokenizer(self.tokenizer, variables, self._control, self._encoded)
        family = _family(adapter, variables) if self.has_template else None
        self.family = "default" if family is None else str(family.config.name)
        self._renderer: Any = family or create_renderer(adapter, DefaultRendererConfig(tool_parser=self._tool_parser()))
        self._variables, self._by_template = variables, (by_template := adapter.apply_chat_template)
        self._one_result = family is not None and _rendered(family.render_ids, *PARALLEL) != _rendered(by_template, *PARALLEL)
        # the package's default renderer makes objects of all arguments, also where the template takes their text
        self._render: Any = by_template if family is None or self._one_result else family.render_ids
        self.stop_ids = sorted({*self._renderer.get_stop_token_ids(), *self.tokenizer.stop_ids})
        self.picture_texts = self._picture_texts(variables) if self.has_template else []
        self.shows_tools = self.has_template and self._differs_with_tools()
        self.shows_system = self.has_template and _rendered(by_template, [_BRIEF, _ASKED], ()) is not None
        self.added_ids, self.byte_ids = self.tokenizer.added_ids, self.tokenizer.byte_ids
        self.readable = self.tokenizer.template_variables - RESERVED  # variables that a request may give
        self.letter = self.tokenizer.encode(self.LETTER).tolist()
        self.plain_markers = self.family == "default"
        self._strips = False
        reasoning = self.parse_tokens([], self.tokenizer.encode(THOUGHT).tolist(), ()).reasoning
        self._strips, self.streams_text = reasoning == "a", reasoning == "a" or self.family == "default"

    def check_variables(self, given: Mapping[str, Any]) -> None:
        """Raises TurnRefused for a client's variable that the template does not read, or that spells a control token."""
        for name, value in given.items():
            spelled = json.dumps(value, ensure_ascii=False)
            message = "" if name in self.readable else "the model's chat template reads no such variable"
            if message or any(text in spelled for text in self._control.texts.values()):
                message = message or "expected no control tokens in it"
                raise TurnRefused(400, message, field=f"chat_template_kwargs.{name[:80]}", code="invalid_value")

    def varied(self, variables: Mapping[str, Any]) -> "ChatTokens":
        """Returns the chat form with variables over the run's, where None takes one away; the newest are kept."""
        return self._varied(json.dumps(variables, sort_keys=True)) if variables else self

    def _variant(self, variables: str) -> "ChatTokens":
        given = {name: value for name, value in {**self._variables, **json.loads(variables)}.items() if value is not None}
        return ChatTokens(self.tokenizer, given, self._control_tokens, self._encoded, self._kind)

    def _differs_with_tools(self) -> bool:
        [messages, _] = PROBES[0]
        try:
            return not np.array_equal(self.render(messages, ()), self.render(messages, (TOOL,)))
        except TurnRefused:
            return False

    def _picture_texts(self, variables: Mapping[str, Any]) -> list[str]:
        def rendered(content: Any) -> str:
            try:
                return self.tokenizer.render([_said("user", content)], {**variables, "add_generation_prompt": True})
            except (ConfigError, *UNREADABLE):
                return ""

        marks = [secrets.token_hex(12) for _ in range(3)]
        parts = [part for mark in marks for part in (text_part(mark), empty_part(self._kind))][:-1]
        shown = rendered(parts)
        first, second = (shown.partition(before)[2].partition(behind)[0] for before, behind in itertools.pairwise(marks))
        pieces = [first] if first == second else first.split("1", 1)
        agrees = "2".join(pieces) == second and rendered(first.join(marks[:2]) + second + marks[2]) == shown
        return pieces if first and agrees else []

    def _tool_parser(self) -> str | None:
        """Returns the parser of tool calls whose marks the model has as tokens, if its template speaks of any."""
        template = self.tokenizer.template or ""
        if self.tokenizer.token_id("<tool_call>") is None:
            return None
        return next((parser for mark, parser in PARSERS.items() if mark in template), None)

    def text_bytes(self, messages: Messages, tools: Messages) -> int:
        """Returns the length of the text that a conversation is rendered from."""
        shown = len(orjson.dumps(tools)) if tools and self.shows_tools else 0
        texts = [text for message in messages for text in (message["content"], message.get("reasoning_content", ""))]
        texts += [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
        return shown + sum(len(text.encode(errors="replace")) for text in texts)

    def render(self, messages: Messages, tools: Messages, place: str = "messages", turns: Iterable[Turn] = ()) -> NDArray[np.int32]:
        """Returns the prompt of a conversation's next turn: int32 [P]. Raises TurnRefused where the template does not take it. ``place``:
        the body's field with the conversation, whose last message is continued where it is the assistant's. ``turns``: of the session: what
        they sampled stays in the assistant's messages."""
        if not self.has_template:
            raise TurnRefused(400, "the model has no chat template; ask /inference/v1/generate with token ids", code="no_chat_template")
        given = list(tools) or None
        try:
            formed = in_call_form(self.tokenizer, messages, {**self._variables, "tools": given})
            guarded, shown = self._guarded(formed, 1, turns), self._control.guarded(given)
            if messages[-1]["role"] == "assistant":
                found = self._by_template(guarded, tools=shown, continue_final_message=True)
            else:
                found = self._render(guarded, tools=shown, add_generation_prompt=True)
        except (ConfigError, *UNREADABLE) as error:
            reason = self._control.plain(str(getattr(error, "expected", error)))  # without the messages themselves, which may be long
            raise TurnRefused(400, f"the model's chat template refuses them: {reason[:300]}", field=place) from None
        return np.asarray(found, np.int32)

    def _guarded(self, messages: Messages, number: int, turns: Iterable[Turn] = ()) -> list[dict[str, Any]]:
        """Returns messages whose texts give no control token, but that what an assistant says has markers, and what was sampled.
        ``number``: of their first picture in the conversation."""
        control, numbers = self._control, itertools.count(number)

        def guarded(message: Mapping[str, Any], key: str) -> Any:
            value, kept_here = message[key], own.get((message["role"], key), ())
            if key != "content" or not self.picture_texts or not isinstance(value, str):
                return control.guarded(value, kept_here)
            first, *further = (control.guarded(text, kept_here) for text in PICTURE_MARK.split(value)[::2])
            return first + "".join(str(next(numbers)).join(self.picture_texts) + text for text in further)

        sampled = np.unique(np.concatenate([np.empty(0, np.int32), *(turn.completion for turn in turns)])).tolist()
        kept = control.markers | {control.texts[token] for token in sampled if token in control.texts and token not in self.stop_ids}
        own = {("assistant", field): kept for field in ("content", "reasoning_content")}
        return [{key: value if key == "role" else guarded(message, key) for key, value in message.items()} for message in messages]

    def grammar(self, asked: ChatTurn, prompt: NDArray[np.int32]) -> str:
        """Returns the structural tag (of xgrammar) that holds a completion to the request's constraints; empty where it has none. Reasoning
        is free. Raises TurnRefused where the request begins the answer, or calls are constrained and the model's are not JSON between
        marks."""
        if not asked.constraints:
            return ""
        if asked.prefill:
            message = "an answer that the request begins cannot be held to it: leave out the last message, the assistant's"
            raise TurnRefused(400, message, field=asked.constraints[0].field, code="unsupported_value")
        schema = next(({"type": "json_schema", "json_schema": one.schema} for one in asked.constraints if one.schema is not None), None)
        required, single = any(one.required for one in asked.constraints), any(one.single for one in asked.constraints)
        answers: list[dict[str, Any]] = [schema] if schema is not None and not required else []
        if asked.tools and asked.tool_choice == "auto":
            answers.append(self._calls_tag(asked, required=required or bool(answers), single=single))
        body: dict[str, Any] = answers[0] if len(answers) == 1 else {"type": "or", "elements": answers}
        return json.dumps({"type": "structural_tag", "format": self._after_reasoning(body, self.text(prompt[-16:].tolist()))})

    def _after_reasoning(self, body: dict[str, Any], tail: str) -> dict[str, Any]:
        """Returns a format with free reasoning before it, where the prompt's ``tail`` has begun it or the model may."""
        space, opened = {"type": "regex", "pattern": r"\s*"}, tail.rpartition(THINKING)
        thought: dict[str, Any] = {"type": "tag", "begin": THINKING, "content": {"type": "any_text"}, "end": THOUGHT_END}
        if opened[1] and THOUGHT_END not in opened[2]:
            return {"type": "sequence", "elements": [{**thought, "begin": ""}, space, body]}
        if THOUGHT_END in tail or self.tokenizer.token_id(THOUGHT_END) is None:
            return body
        return {"type": "sequence", "elements": [{"type": "optional", "content": thought}, space, body]}

    def _calls_tag(self, asked: ChatTurn, *, required: bool, single: bool) -> dict[str, Any]:
        called = [_ASKED, _said("assistant", "", tool_calls=[CALL])]
        if (form := JSON_CALL.search(self.text(_rendered(self._by_template, called, (TOOL,)) or []))) is None:
            message = "the model's tool calls are not JSON between marks: they cannot be constrained"
            raise TurnRefused(400, message, field=asked.constraints[0].field, code="unsupported_value")
        begin, middle, end = form.groups()
        named = {name for one in asked.constraints for name in one.tools}
        tags = [
            {
                "type": "tag",
                "begin": f"{begin}{json.dumps(tool['name'])[1:-1]}{middle}",
                "content": {"type": "json_schema", "json_schema": tool.get("parameters") or {"type": "object"}},
                "end": end,
            }
            for tool in (one["function"] for one in asked.tools)
            if not named or tool["name"] in named
        ]
        many = {"tags": tags, "at_least_one": required, "stop_after_first": single}
        if required:
            return {"type": "tags_with_separator", "separator": "\n", **many}
        return {"type": "triggered_tags", "triggers": [begin.split("{")[0].strip()], **many}

    def bridge(self, turn: Turn, messages: Messages, tools: Messages) -> NDArray[np.int32] | None:
        """Returns the prompt that carries a turn on with further messages, beginning with its very tokens; None where that is not sure."""
        before, generated = turn.prompt.tolist(), turn.completion.tolist()
        if self._one_result and sum(message["role"] == "tool" for message in messages) > 1:
            return None
        try:
            found = self._renderer.bridge_to_next_turn(
                before, generated, self._guarded(messages, len(turn.pictures) + 1), tools=self._control.guarded(list(tools) or None)
            )
        except UNREADABLE:
            return None
        ids = None if found is None else np.asarray(found.token_ids, np.int32)
        begins = ids is not None and np.array_equal(ids[: len(before) + len(generated)], turn.tokens)
        return ids if begins else None

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the ids of a client's text: int32 [T], behind what the checkpoint puts before texts; control tokens as in messages."""
        ids = self._control.encode(self._control.guarded(text)).tolist()
        return np.asarray([*self.tokenizer.lacks(ids, begin=True), *ids], np.int32)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def parse(self, turn: Turn, tools: Messages) -> ParsedTurn:
        """Returns a turn's completion as a message; nothing of it is repaired."""
        return self.parse_tokens(turn.prompt.tolist(), turn.completion.tolist(), tools)

    def _spelled(self, completion: list[int], span: tuple[int, int] | None, content: str) -> str:
        """Returns a call as it was sampled, with its marks, the white space between it and content, and that at the end; empty without its
        ``span`` of tokens."""
        if span is None:
            return ""
        parts = completion[: span[0]], completion[slice(*span)], [token for token in completion[span[1] :] if token not in self.stop_ids]
        before, own, behind = map(self.text, parts)
        return (before[len(before.rstrip()) :] if content else "") + own + (behind if behind.isspace() else "")

    def parse_tokens(self, prompt: list[int], completion: list[int], tools: Messages) -> ParsedTurn:
        """Returns a completion, or its beginning, as a message. Reasoning that was not closed has the form of one that was."""
        try:
            found = self._renderer.parse_response(completion, tools=list(tools) or None, prompt_ids=prompt)
        except UNREADABLE:  # a model samples anything
            return ParsedTurn("", "", (ParsedCall(self.tokenizer.decode(completion), "unreadable"),))
        calls = tuple(
            ParsedCall(
                self._spelled(completion, call.token_span, found.content) or call.raw,
                call_status(str(call.status.value), call.name, call.arguments),
                call.name or "",
                call.arguments,
                call.id,
            )
            for call in found.tool_calls
        )
        reasoning = found.reasoning_content or ""
        return ParsedTurn(found.content, reasoning.strip() if self._strips else reasoning, calls)


def call_status(status: str, name: Any, arguments: Any) -> str:
    """Returns the status of a sampled call: a name is text, and arguments are an object of JSON, which has no NaN and no
    Infinity, and that a client may send back."""
    if status != "ok":
        return status
    if not isinstance(name, str) or not _can_be_sent(name):
        return "invalid_name"
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return "invalid_arguments"
    return status if (read is None or isinstance(read, dict)) and _can_be_sent(read) else "invalid_arguments"


def _can_be_sent(value: Any) -> bool:
    """Returns whether a value can be JSON in UTF-8: a model may sample half of a surrogate pair, too."""
    try:
        json.dumps(shallow(value), allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _family(tokenizer: RendererTokenizer, variables: Mapping[str, Any]) -> Any:
    """Returns the first renderer of a family that renders the probes as the model's template does; None where none does."""
    from renderers import create_renderer
    from renderers.configs import RendererConfig

    expected = [_rendered(tokenizer.apply_chat_template, *probe) for probe in PROBES]
    if None in expected:
        return None
    for config in get_args(get_args(RendererConfig)[0]):
        name = config.model_fields["name"].default
        if name in ("auto", "default", "custom"):
            continue
        try:
            fields = {key: value for key, value in variables.items() if key in config.template_field_names()}
            if len(fields) < len(variables):
                continue  # the template knows a variable that the renderer does not
            renderer = create_renderer(tokenizer, config(**fields))
            if [_rendered(renderer.render_ids, *probe) for probe in PROBES] == expected:
                return renderer
        except Exception as error:  # a renderer for other tokens fails in its own way
            structlog.get_logger().debug("renderer_does_not_fit", renderer=name, error=str(error)[:200])
    return None


def _rendered(render: Any, messages: Messages, tools: Messages) -> list[int] | None:
    try:
        return list(render([dict(message) for message in messages], tools=list(tools) or None, add_generation_prompt=True))
    except (ConfigError, *UNREADABLE):
        return None
