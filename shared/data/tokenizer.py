"""An HF checkpoint's tokenizer without transformers or torch: `tokenizers` for text, jinja2 for the chat template."""

from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.data.chat_template import DEFAULT, FIELD, ChatTemplates, read_variables
from shared.data.checkpoint_tokenizer import CheckpointTokenizer
from shared.data.control_tokens import ControlTokens
from shared.runtime.errors import ConfigError


class Tokenizer:
    """Text ↔ token ids, chat messages → text. ``model``: an HF checkpoint directory with tokenizer.json (and the other side files).

    Attributes:
        templates: the chat templates by name. template: the one that is used without a name, or the first.
        text_prefix, text_suffix: ids that the checkpoint asks to put around a text. The suffix is never added: a prompt is continued.
        notes: what of the side files is passed over.
    """

    def __init__(self, model: str | Path) -> None:
        self._files = CheckpointTokenizer(Path(model))
        self._tokenizer, self._special, self.notes = self._files.backend, self._files.named, self._files.notes
        self.text_prefix, self.text_suffix = self._files.prefix, self._files.suffix
        self._templates = ChatTemplates(Path(model), self._files.settings.get("chat_template"))
        self.templates = self._templates.named
        self.template: str | None = self.templates.get(DEFAULT, next(iter(self.templates.values()), None))
        self.has_chat_template = self.template is not None
        self.vocabulary_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.stop_ids = self._stop_ids()

    def encode(self, text: str, begin: bool = False) -> NDArray[np.int32]:
        """Returns the token ids of a text, int32 [T]; special tokens only where the text spells them.

        Args:
            begin: put the checkpoint's ``text_prefix`` before them, unless the text spells it itself.
        """
        # the call for several leaves out what is not asked for here: where in the text each token lies
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = encoding.ids
        return np.frombuffer(array("i", [*self._lacks(ids, begin), *ids] if begin else ids), dtype=np.int32)

    def encode_behind(self, before: str, text: str) -> NDArray[np.int32]:
        """Returns the token ids of a text that stands behind another: some tokenizers put a space before what begins (Llama 2's)."""
        for context in (before, "\n") if before and self._adds_space else ():
            begun, both = self.encode(context), self.encode(context + text)
            if np.array_equal(both[: len(begun)], begun):
                return both[len(begun) :]
        return self.encode(text)

    @cached_property
    def _adds_space(self) -> bool:
        return not np.array_equal(self.encode("\na"), [*self.encode("\n"), *self.encode("a")])

    def lengths(self, texts: Sequence[str], begin: Sequence[bool] = ()) -> list[int]:
        """Returns how many tokens `encode` makes of each text; all processor cores share the work."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        begins = begin or [False] * len(texts)
        return [len(one) + (len(self._lacks(one.ids, True)) if begun else 0) for one, begun in zip(encodings, begins, strict=True)]

    def _lacks(self, ids: Sequence[int], begin: bool) -> list[int]:
        return self.text_prefix if begin and list(ids[: len(self.text_prefix)]) != self.text_prefix else []

    def decode(self, tokens: Sequence[int] | NDArray[np.int32], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids, special tokens left out unless they are wanted."""
        text = str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=skip_special_tokens))
        return _cleaned(text) if self._files.cleans_spaces else text

    def pieces(self, tokens: Sequence[int] | NDArray[np.int32]) -> list[str]:
        """Returns the text of each token id by itself, special tokens included; part of a character is shown as U+FFFD."""
        return [str(self._tokenizer.decode([int(token)], skip_special_tokens=False)) for token in tokens]

    def token_bytes(self, tokens: Sequence[int] | NDArray[np.int32]) -> list[bytes]:
        """Returns the bytes of each token id by itself; of a part of a character too, where the vocabulary has letters for bytes."""
        names = [self._tokenizer.id_to_token(int(token)) or "" for token in tokens]
        return [
            text.encode() if "\ufffd" not in text or (raw := _raw_bytes(name)) is None else raw
            for name, text in zip(names, self.pieces(tokens), strict=True)
        ]

    def shown(self, token: int) -> str:
        """Returns a token for a reader: its text and id."""
        return f"{self._tokenizer.id_to_token(token)} (id {token})"

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
        """Returns the texts of the special tokens that the checkpoint declares: those with a name, then the others."""
        return self._files.special

    @property
    def skipped_tokens(self) -> list[str]:
        """Returns the texts of the tokens that are left out of responses, declared by the checkpoint or not."""
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

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Returns the names of the variables that the chat templates read."""
        return frozenset().union(*map(read_variables, self.templates.values()))

    @cached_property
    def control_tokens(self) -> dict[str, ControlTokens]:
        """Returns what encodes rendered messages, by what control tokens are there that text of others spells: text, or as_written."""
        return {spelled: ControlTokens(self._tokenizer, spelled == "as_written") for spelled in ("text", "as_written")}

    def render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Renders chat messages by the model's chat template, with the generation prompt.

        ``variables``: more of the template's variables; ``tools`` and ``documents`` are none unless they are among them, as templates
        expect of transformers. Raises ConfigError where the model has no template or it does not take these messages, BrokenTemplate
        where it takes none.
        """
        if self.template is None:
            expected = "the model has no chat template; give it a chat_template.jinja, or prompts as text"
            raise ConfigError(FIELD, True, expected)
        return self._templates.render(messages, {**self._special, **variables})

    def _stop_ids(self) -> list[int]:
        """Returns the ids that end a response: generation_config's, else config's, else the tokenizer's eos token."""
        config, text = self._files.read("config.json"), "text_config"
        nested = config.get(text)
        sources = {"generation_config.json": self._files.read("generation_config.json"), "config.json": config}
        sources[f"config.json: {text}"] = nested if isinstance(nested, dict) else {}
        for name, source in sources.items():
            stated = source.get("eos_token_id")
            ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
            if not all(type(token) is int and token >= 0 for token in ids):
                raise self._files.refusal(f"{name}: eos_token_id", f"a token id or a list of them, found {stated!r}")
            if ids:
                return list(dict.fromkeys(ids))
        return [] if self.eos_id is None else [self.eos_id]


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
# The letters of byte-level vocabularies (GPT-2's): bytes that print are themselves, the others follow from 256 on
_BYTES = {chr(one): one for one in _PRINTED} | {chr(256 + at): one for at, one in enumerate(sorted({*range(256)} - {*_PRINTED}))}


def _raw_bytes(name: str) -> bytes | None:
    """Returns the bytes of a token by its name in the vocabulary, ``<0xE2>`` or letters of bytes; None for another name."""
    if len(name) == 6 and name.startswith("<0x"):
        return bytes.fromhex(name[3:5])
    return bytes(_BYTES[letter] for letter in name) if all(letter in _BYTES for letter in name) else None


def _cleaned(text: str) -> str:
    """Returns decoded text without the spaces that word-piece models leave before punctuation."""
    for spaced in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced.strip())
    return text
