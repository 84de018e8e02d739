"""An HF checkpoint's tokenizer without transformers or torch: `tokenizers` for text, jinja2 for the chat template."""

import datetime
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers
from numpy.typing import NDArray

from shared.runtime.errors import ConfigError
from shared.runtime.untrusted_files import parse_json


class Tokenizer:
    """Text ↔ token ids, chat messages → text. ``model``: an HF checkpoint directory with tokenizer.json (and tokenizer_config.json,
    chat_template.jinja, generation_config.json)."""

    def __init__(self, model: str | Path) -> None:
        model = Path(model)
        path = model / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for a missing or malformed file
            raise ConfigError("model.hf_checkpoint", str(path), f"not a readable tokenizer.json: {error}") from None
        settings = _json(model / "tokenizer_config.json")
        self._special = {name: _content(settings[name]) for name in ("bos_token", "eos_token", "pad_token") if settings.get(name)}
        template_file = model / "chat_template.jinja"
        self.template: str | None = template_file.read_text() if template_file.is_file() else settings.get("chat_template")
        self.has_chat_template = self.template is not None
        self.vocabulary_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.stop_ids = self._stop_ids(model)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the token ids of a text, int32 [T]; special tokens only where the text spells them."""
        # the call for several leaves out what nobody here asks for: where in the text each token lies
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int32)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Returns how many tokens `encode` makes of each text; all processor cores share the work."""
        return [len(encoding) for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int] | NDArray[np.int32], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids, special tokens left out unless they are wanted."""
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=skip_special_tokens))

    def pieces(self, tokens: Sequence[int] | NDArray[np.int32]) -> list[str]:
        """Returns the text of each token id by itself, special tokens included; part of a character is shown as U+FFFD."""
        return [str(self._tokenizer.decode([int(token)], skip_special_tokens=False)) for token in tokens]

    @cached_property
    def longest_token(self) -> int:
        """Returns the most bytes of text that one token stands for."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its text; None where there is none."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    @property
    def eos_id(self) -> int | None:
        """Returns the id of the tokenizer's own end token, if it has one."""
        return self.token_id(self._special.get("eos_token", ""))

    @property
    def special_tokens(self) -> list[str]:
        """Returns the texts of the tokens that are left out of responses."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]

    @property
    def added_ids(self) -> frozenset[int]:
        """Returns the ids of the tokens that stand beside the vocabulary of text: special ones, and markers of chat templates."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @property
    def byte_ids(self) -> frozenset[int]:
        """Returns the ids of the tokens that are one byte each, of a vocabulary that falls back to them."""
        found = (self.token_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token for token in found if token is not None)

    def render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Renders chat messages by the model's chat template, with the generation prompt.

        ``variables``: more of the template's variables; ``tools`` and ``documents`` are none unless they are among them, as templates
        expect of transformers. Raises ConfigError where the model has no template or it does not take these messages.
        """
        if self.template is None:
            expected = "the model has no chat template; give it a chat_template.jinja, or prompts as text"
            raise ConfigError("data.apply_chat_template", True, expected)
        try:
            given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
            return self._compiled.render(**{**given, **self._special, **variables})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # a template can raise any of them
            raise ConfigError("data.apply_chat_template", messages, f"the chat template refuses it: {error}") from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """Returns the chat template, compiled once: that takes a hundred times as long as rendering a chat."""
        assert self.template is not None
        return _environment().from_string(self.template)

    def _stop_ids(self, model: Path) -> list[int]:
        """Returns the ids that end a response: generation_config's, else config's, else the tokenizer's eos token."""
        for name in ("generation_config.json", "config.json"):
            ids = _json(model / name).get("eos_token_id")
            if ids is not None:
                return list(ids) if isinstance(ids, list) else [ids]
        eos = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        return [] if eos is None else [eos]


def _environment() -> jinja2.Environment:
    """Returns the environment of chat templates: the syntax, filter and functions that transformers gives them."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment.filters["tojson"] = tojson  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError("model.hf_checkpoint", str(path), f"not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
