"""A checkpoint's chat templates, and the environment that they are rendered in: syntax, filters and functions as in transformers."""

import datetime
import functools
import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from shared.model.hf_checkpoint import TEMPLATE_FOLDER
from shared.runtime.errors import ConfigError

FIELD, DEFAULT = "data.apply_chat_template", "default"

_USER, _SYSTEM, _ANSWER = ({"role": role, "content": "?"} for role in ("user", "system", "assistant"))
_PLAIN_CHATS = ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER])
_PLAIN_TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}, "required": []}}
_OF_PYTHON = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, SyntaxError, MemoryError)
_RAISED = (jinja2.TemplateError, *_OF_PYTHON)  # The errors that a template can raise


class BrokenTemplate(ConfigError):
    """A chat template that fails whatever the chat: no data row is at fault, and none is skipped for it."""


class ChatTemplates:
    """The templates of a checkpoint by name; a single one is called `DEFAULT`. Raises ConfigError for an entry that holds none.

    Those in files go before ``stated``, what tokenizer_config.json holds: text, or named templates.
    """

    def __init__(self, model: Path, stated: Any) -> None:
        paths = {DEFAULT: model / "chat_template.jinja"} if (model / "chat_template.jinja").is_file() else {}
        paths |= {path.name.removesuffix(".jinja"): path for path in (model / TEMPLATE_FOLDER).glob("*.jinja")}
        entry = f"{model / 'tokenizer_config.json'}: chat_template"
        try:
            if isinstance(stated, list):
                stated = {one["name"]: one["template"] for one in stated}
            held = {DEFAULT: stated} if isinstance(stated, str) else dict(stated or {})
            self.named: dict[str, str] = {name: path.read_text(encoding="utf-8") for name, path in paths.items()} or held
            if not all(isinstance(text, str) for pair in self.named.items() for text in pair):
                raise TypeError("a template is text")
        except (OSError, TypeError, ValueError, KeyError) as error:
            raise ConfigError("model.hf_checkpoint", entry, f"a template's text, or a list of name and template ({error!r})") from None
        self._places = {name: str(paths.get(name, entry)) for name in self.named}

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Renders messages by the template that ``chat_template`` among the variables names, or is; where ``tools`` are given by the one
        called tool_use. Raises ConfigError where it does not take these messages, BrokenTemplate where it takes none.
        """
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
        if not isinstance(asked := given.pop("chat_template", None) or None, str | None):
            raise BrokenTemplate("data.apply_chat_template_kwargs.chat_template", asked, "the text or the name of a template")
        name = asked or ("tool_use" if given["tools"] is not None and "tool_use" in self.named else DEFAULT)
        if (text := self.named.get(name, asked)) is None:
            expected = f"one called {DEFAULT}, or apply_chat_template_kwargs.chat_template to name one"
            raise BrokenTemplate(FIELD, f"chat templates called {', '.join(sorted(self.named))}", expected)
        try:
            return _compiled(text).render(**{**given, "messages": messages})
        except _RAISED as error:
            if not _is_broken(text, error, given):
                raise ConfigError(FIELD, messages, f"the chat template refuses it: {error}") from None
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
            place = self._places.get(name, "apply_chat_template_kwargs.chat_template")
            expected = f"a template of transformers; whatever the chat, the chat template refuses it: {error}"
            raise BrokenTemplate(FIELD, f"{place}, line {getattr(error, 'lineno', (lines or '?')[-1])}", expected) from None


def _is_broken(text: str, error: Exception, given: Mapping[str, Any]) -> bool:
    """Returns whether a template's error is its own: it does not compile, or renders no plain chat either.

    Its own ``raise_exception`` refuses a chat, and says nothing of others.
    """
    syntax = isinstance(error, jinja2.TemplateSyntaxError | SyntaxError)
    if syntax or type(error) in (jinja2.TemplateError, jinja2.TemplateRuntimeError):  # the latter: an unknown filter or test
        return type(error) is not jinja2.TemplateError
    tools = None if given["tools"] is None else [{"type": "function", "function": _PLAIN_TOOL}]
    failures = set[type]()
    for chat in _PLAIN_CHATS:
        try:
            _compiled(text).render(**{**given, "tools": tools, "messages": chat})
            return False
        except _RAISED as other:
            failures.add(type(other))
    return failures != {jinja2.TemplateError}


class _Generation(jinja2.ext.Extension):
    """The tag around what the model writes, by which transformers makes masks. Its body is rendered as it stands, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def read_variables(text: str) -> set[str]:
    """Returns the names of the variables that a template reads; none where it cannot be read."""
    try:
        return jinja2.meta.find_undeclared_variables(_environment().parse(text))
    except jinja2.TemplateSyntaxError:
        return set()


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    """Returns a template, compiled once: that takes a hundred times as long as rendering a chat."""
    return _environment().from_string(text)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = tojson  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment
