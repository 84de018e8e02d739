"""Control tokens that text of others spells: it gives the tokens of the text. Pure.

Before such text is rendered, each control token in it is broken by a mark behind its first character (`guarded`). Those that are whole in
what is rendered are the template's. They reach a tokenizer of the same model by names that cannot be guessed, and it knows none by their
text; the marks are taken out before, so that all text between two control tokens is encoded in one piece.
"""

import itertools
import re
import secrets
import string
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken

from shared.runtime.errors import ConfigError

ALPHABET = string.ascii_lowercase + string.digits  # of names and marks: normalizers that lowercase leave these as they are
WORD_LENGTH, MOST_TRIES = 24, 10_000  # tries for each word


class ControlTokens:
    """The control tokens of a tokenizer: all beside its vocabulary that are special, or no words and no white space.

    Args:
        as_written: text of others is not guarded, and gives the control tokens that it spells.

    Attributes:
        texts: id → text. markers: the texts of those that are not special, such as ``<think>``.
    """

    def __init__(self, backend: tokenizers.Tokenizer, as_written: bool = False) -> None:
        split = backend.encode_special_tokens  # the checkpoint asks for special tokens as text, wherever they stand
        added = {index: token for index, token in backend.get_added_tokens_decoder().items() if not (split and token.special)}
        self.texts = {} if as_written else {index: token.content for index, token in added.items() if _is_control(token)}
        self.markers = frozenset(added[index].content for index in self.texts if not added[index].special)
        self._mark, *names = _random_words(1 + len(self.texts), [token.content for token in added.values()])
        self._names = dict(zip(self.texts.values(), names, strict=True))
        self._heads, self._tails = _parts(self._names)
        self._words = [text for text in self._names if text.isidentifier()]
        self._longest = max(map(len, self._names), default=0)
        self._spelled = re.compile(f"(?=({_any_of(self._names)})).", re.DOTALL)
        self._whole = re.compile(_any_of(self._names))
        self._backend, self._ids = _renamed(backend, added, self._names)
        self._backend.add_tokens([AddedToken(self._mark, normalized=False)])
        own = {index for index in self.texts if backend.model.id_to_token(index) is not None}
        self._own = own - {backend.token_to_id(getattr(backend.model, "unk_token", None) or "")}

    def guarded(self, value: Any, kept: Collection[str] = ()) -> Any:
        """Returns a value of JSON whose texts, keys of objects too, give no control token when they are rendered and encoded.

        Args:
            kept: control tokens that stay what they are.
        """
        if isinstance(value, Mapping):
            return {self.guarded(key, self._words): self.guarded(one, kept) for key, one in value.items()}  # templates look keys up
        if isinstance(value, list | tuple):
            return [self.guarded(one, kept) for one in value]
        if not isinstance(value, str):
            return value
        broken = self._spelled.sub(lambda found: found[0] if found[1] in kept else found[0] + self._mark, value)
        # the text beside it may be the rest of a token; templates compare words, as the names of roles
        lengths = range(1, 1 if re.fullmatch(r"\w+", value) else self._longest)
        start = self._mark if any(value[:length] in self._tails for length in lengths) else ""
        inside = f"<{value}>" in self._names or f"</{value}>" in self._names  # templates make tags of names
        return start + broken + (self._mark if inside or any(value[-length:] in self._heads for length in lengths) else "")

    def plain(self, text: str) -> str:
        """Returns rendered text without the marks of `guarded`."""
        return text.replace(self._mark, "")

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the ids of rendered text, int32 [T]: control tokens where it spells them and nothing of `guarded` does."""
        named = self._whole.sub(lambda found: self._names[found[0]], text)
        ids = self._encoded(self.plain(named))
        if self._mark in named and not self._own.isdisjoint(ids):  # they are in the vocabulary of text, too: the marks keep them apart
            mark = self._backend.token_to_id(self._mark)
            ids = [token for token in self._encoded(named) if token != mark]
        return np.asarray([self._ids.get(token, token) for token in ids], np.int32)

    def _encoded(self, text: str) -> list[int]:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def _renamed(
    backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken], names: Mapping[str, str]
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """Returns a tokenizer that knows added tokens by other names, by their text → name, and what its ids for them are."""
    made, normalizer = tokenizers.Tokenizer(backend.model), backend.normalizer
    if normalizer is not None:
        made.normalizer = normalizer
    if backend.pre_tokenizer is not None:
        made.pre_tokenizer = backend.pre_tokenizer
    free = 1 + max(made.get_vocab(False).values(), default=-1)  # ids may have holes: those of names come behind all of them
    made.add_tokens([secrets.token_hex(12) for _ in range(free - made.get_vocab_size(False))])
    tokens = {index: _named(token, names[token.content], normalizer) if token.content in names else token for index, token in added.items()}
    made.add_tokens([tokens[index] for index in sorted(tokens)])
    return made, {made.token_to_id(token.content): index for index, token in tokens.items()}


def _named(token: AddedToken, name: str, normalizer: Any) -> AddedToken:
    """Returns a token by another name. Normalized text is where it is looked for only if that has the name unchanged."""
    normalized = token.normalized and (normalizer is None or normalizer.normalize_str(name) == name)
    return AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=normalized)


def _random_words(count: int, texts: Collection[str]) -> list[str]:
    """Returns words that cannot be guessed, and that complete none of the texts together with what stands beside them."""
    heads, tails = ({cut(text, at) for text in texts for at in range(1, len(text))} for cut in (lambda t, at: t[:at], lambda t, at: t[at:]))
    found = list[str]()
    for _ in range(MOST_TRIES * count):
        word = "".join(secrets.choice(ALPHABET) for _ in range(WORD_LENGTH))
        if not any(word[:length] in tails or word[-length:] in heads for length in range(1, WORD_LENGTH)):
            found.append(word)
        if len(found) == count:
            return found
    raise ConfigError("model.hf_checkpoint", f"{len(texts)} added tokens", "a letter or digit that begins or ends none of them")


def _parts(texts: Iterable[str]) -> tuple[set[str], set[str]]:
    """Returns the beginnings of texts and their ends."""
    cuts = [(text[:at], text[at:]) for text in texts for at in range(1, len(text))]
    return {head for head, _ in cuts}, {tail for _, tail in cuts}


def _is_control(token: AddedToken) -> bool:
    """Returns whether a token is none of those that add to the vocabulary of text: characters, words, white space."""
    is_word = all(one.isspace() or one == "▁" or unicodedata.category(one)[0] in "LMN" for one in token.content)
    return len(token.content) > 1 and (token.special or not is_word)


def _any_of(texts: Iterable[str]) -> str:
    """Returns a regular expression of any of these texts, the longest first, that looks at no character twice; of none it finds none."""
    left = sorted(set(texts))
    if not left:
        return "(?!)"
    groups = itertools.groupby(filter(None, left), key=lambda text: text[0])
    branches = [re.escape(first) + _any_of(text[1:] for text in group) for first, group in groups]
    if len(branches) == 1 and left[0]:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if not left[0] else ''}" if branches else ""
