"""The form in which a model's chat template takes the tool calls of an assistant's message. Pure.

Clients and rows of files give a call's arguments as JSON text or as an object. Some templates iterate over an object, some concatenate
text, some take either. Each template is tried once with a call: with an object first, as SGLang gives it, then with text.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import parse_json

_TRIED = {"place": "Lisbon"}


class CallForm(NamedTuple):
    """How a template shows calls.

    ``objects``: with their arguments as objects. ``texts``: as text, ``verbatim``: not escaped. ``null_content``: only in a message whose
    content is null (the first DeepSeek V3 and R1). ``short_ids``: only with ids of nine letters and digits (Mistral).
    """

    objects: bool
    texts: bool
    verbatim: bool
    null_content: bool
    short_ids: bool

    def message(self, message: Mapping[str, Any], keep_text: bool) -> dict[str, Any]:
        formed = {key: value for key, value in message.items() if key != "tool_calls" or value}  # some ask only whether the field is there
        if self.short_ids and "tool_call_id" in formed:
            formed["tool_call_id"] = _short(formed["tool_call_id"])
        if isinstance(calls := formed.get("tool_calls"), list):
            formed["content"] = formed.get("content") or (None if self.null_content else "")
            formed["tool_calls"] = [self._call(call, keep_text) for call in calls]
        return formed

    def _call(self, call: Any, keep_text: bool) -> Any:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call  # the template refuses it
        if "arguments" in function:
            function = {**function, "arguments": self._arguments(function["arguments"], keep_text)}
        formed = {**call, "function": function} if "function" in call else function
        return {**formed, "id": _short(call["id"])} if self.short_ids and "id" in call else formed

    def _arguments(self, given: Any, keep_text: bool) -> Any:
        """Returns a call's arguments in this form. What is no object stays text, or is in an object where the template takes no text."""
        found, text = _object(given), given if isinstance(given, str) else _dumped(given)
        if found is None and not self.texts:
            found = {"arguments": text}
        if found is None or (keep_text and self.verbatim and found and isinstance(given, str)):
            return text
        return found if self.objects else (text if found else "{}")


def in_call_form(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, keep_text: bool = False
) -> list[dict[str, Any]]:
    """Returns messages with their tool calls as the model's chat template takes them.

    Args:
        variables: the template's. keep_text: text stays as it is where the template shows it so; else it becomes an object where it can.
    """
    if not any("tool_calls" in message for message in messages):
        return [dict(message) for message in messages]
    form = _form(tokenizer, json.dumps({**variables, "add_generation_prompt": False}, sort_keys=True, default=str))
    return [form.message(message, keep_text) for message in messages]


@lru_cache(maxsize=64)
def _form(tokenizer: Tokenizer, variables: str) -> CallForm:
    """Returns the form in which the template shows a call; objects where it shows or takes none. ``variables``: as JSON."""

    def shown(arguments: Any, first: list[Any], is_answered: bool, content: str | None, id: str) -> str:
        function = {"name": "tried", "arguments": arguments}
        call = {"id": id, "type": "function", "function": function, **function}  # some templates know calls without a function in them
        said = [*first, {"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
        result = {"role": "tool", "content": "!", "name": "tried", "tool_call_id": id}
        try:
            return tokenizer.render([*said, result] if is_answered else said, json.loads(variables))
        except ConfigError:
            return ""

    system = {"role": "system", "content": "?"}  # some refuse a chat without it, or that ends in a call
    chats = itertools.product(([], [system]), (False, True))
    for (first, is_answered), content, id in itertools.product(chats, ("", None), ("call_0", "call00000")):
        as_object, as_text = (shown(given, first, is_answered, content, id) for given in (_TRIED, _dumped(_TRIED)))
        objects = _TRIED["place"] in as_object and str(_TRIED) not in as_object  # no model was trained on Python's own form
        if objects or _TRIED["place"] in as_text:
            return CallForm(objects, _TRIED["place"] in as_text, _dumped(_TRIED) in as_text, content is None, id != "call_0")
    return CallForm(True, False, False, False, False)


def _object(arguments: Any) -> dict[str, Any] | None:
    """Returns arguments as an object, an empty one for nothing and null; None for those that are no object, or cannot be tokenised."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else None
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:  # not JSON, too deep, or with half of a surrogate pair
            return None
    found = {} if arguments is None else arguments
    return found if isinstance(found, dict) else None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _short(id: Any) -> str:
    text = str(id)
    return text if len(text) == 9 and text.isalnum() else hashlib.sha256(text.encode()).hexdigest()[:9]
