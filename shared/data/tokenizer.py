"""An HF checkpoint's tokenizer without transformers or torch: `tokenizers` for text, jinja2 for the chat template.

It is made of the side files as `AutoTokenizer` of transformers 5.12 makes it. Some of its classes take the vocabulary of tokenizer.json
alone and build what is around it themselves; so it is done here. A class or an entry that is not read is refused by name.

Tool calls: clients and rows of files give a call's arguments as JSON text or as an object. Some templates iterate over an object, some
concatenate text, some take either. Each template is tried once with a call: with an object first, as SGLang gives it, then with text.
"""

import hashlib
import itertools
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers

from shared.data.chat_template import DEFAULT, FIELD, ChatTemplates, read_variables
from shared.data.control_tokens import ControlTokens
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import parse_json

_CONFIG = "tokenizer_config.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _ADDITIONAL, _DECODER = "extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"
_UNREAD = ("tokenizer_file", "vocab", "merges", "init_inputs", "post_processor", "tokenizer_object", "fix_mistral_regex")
"""Entries of tokenizer_config.json that would put something else in the place of what tokenizer.json holds."""

_AS_FILED = ("TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer")
_BUILT = ("LlamaTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "GPT2Tokenizer")
"""Classes that take tokenizer.json as it is, and those that build what is around its vocabulary."""

_FAMILIES = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "deepseek_v2", "deepseek_v3"), _AS_FILED[0]),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "phi3", "phimoe", "mistral", "mistral3", "mixtral", "ministral"), _AS_FILED[0]),
    **dict.fromkeys(("ministral3", "granite", "granitemoe", "olmo3", "internlm2", "minimax_m2", "nemotron", "step3p5"), _AS_FILED[0]),
    **dict.fromkeys(("gpt2", "phi", "starcoder2", "gpt_bigcode"), "GPT2Tokenizer"),
    **dict.fromkeys(("olmo", "olmo2", "olmoe", "gpt_neox"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
}
"""``model_type`` → the class of the family. It goes before the class that a checkpoint names where it is the first of `_AS_FILED`, and for
qwen2; else behind it."""

_PROBE = "a b\n\tc  12"  # A text with white space of several kinds

_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN3_5 = _QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_QWEN = {"Qwen2Tokenizer": _QWEN2, "Qwen3_5Tokenizer": _QWEN3_5}  # How Qwen's tokenizers split a text, by class


class CheckpointTokenizer:
    """Raises ConfigError for side files that cannot be read, naming file and entry.

    Attributes:
        backend: of the `tokenizers` library. named: special tokens by name, as chat templates see them. special: the texts of all of them.
        prefix, suffix: ids that the checkpoint asks to put around a text.
        cleans_spaces: whether decoded text loses spaces before punctuation. notes: what of the files is passed over.
    """

    def __init__(self, model: Path) -> None:
        self._model, self.notes, self._at = model, list[str](), "tokenizer.json"
        try:
            filed = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
            self.settings = self.read(_CONFIG)
            self._load(filed, self.read("config.json"))
        except ConfigError:
            raise
        except Exception as error:  # the library raises bare ones
            raise self.refusal(self._at, f"not a readable {self._at}: {error}; fetch the model's own again") from None

    def read(self, name: str) -> dict[str, Any]:
        """Returns a side file's JSON object; an empty one where the file is missing. Raises ConfigError."""
        try:
            value = parse_json((self._model / name).read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise self.refusal(name, f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise self.refusal(name, "a JSON object")
        return value

    def refusal(self, at: str, expected: str) -> ConfigError:
        """Returns the error for a side file, or for ``FILE: ENTRY``."""
        return ConfigError("model.hf_checkpoint", str(self._model / at), expected)

    def _load(self, filed: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        self._at, settings = f"{_CONFIG}: tokenizer_class, auto_map, add_prefix_space, fast_tokenizer_files", self.settings
        versions = any(re.search(r"tokenizer\..*\.json", name) for name in settings.get("fast_tokenizer_files") or ())
        for entry in (*filter(settings.get, _UNREAD), *["fast_tokenizer_files"] * versions):
            raise self.refusal(f"{_CONFIG}: {entry}", "none: it is not read here, and changes what tokenizer.json holds")
        name, kind = self._built_class(filed, *self._class(config)), type(filed.model).__name__
        self.backend, tokens = _built(name, filed, settings) if name else (filed, {})
        if (held := filed.pre_tokenizer) is not None and type(held) is not type(self.backend.pre_tokenizer):
            self._compare(filed, name, type(held).__name__)
        if filed.padding is not None:
            tokens.setdefault("pad_token", filed.padding["pad_token"])
        self._add_tokens(filed, tokens, name in _QWEN)
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
        cleans = "clean_up_tokenization_spaces"
        forced = kind != "BPE" or settings.get(f"{cleans}_for_bpe_even_though_it_will_corrupt_output")
        self.cleans_spaces = bool(settings.get(cleans) and forced)
        self._at = "tokenizer.json: model"
        self.prefix, self.suffix = self._around()

    def _compare(self, filed: tokenizers.Tokenizer, name: str, passed_over: str) -> None:
        """Notes a class that splits text otherwise than tokenizer.json; refuses one that loses what the file's own way keeps, as that of
        DeepSeek's distilled Llamas does in transformers 5.12, with their byte-level vocabulary."""
        way = "tokenizer_class = PreTrainedTokenizerFast has it read"
        kept = [each.decode(each.encode(_PROBE, add_special_tokens=False).ids) == _PROBE for each in (filed, self.backend)]
        if kept == [True, False]:
            lost = f"not {name}, which loses white space: it passes over tokenizer.json's {passed_over}, by which SGLang reads text; {way}"
            raise self.refusal(f"{_CONFIG}: tokenizer_class", lost)
        passed = f"tokenizer.json's ({passed_over}) is passed over, which SGLang takes"
        self.notes.append(f"{_CONFIG}: {name} splits text in a way of its own, as in transformers; {passed}; {way}")

    def _class(self, config: Mapping[str, Any]) -> tuple[str, bool]:
        """Returns the name of the class that transformers takes, and whether the checkpoint names it."""
        named = str(self.settings.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
        family, code = _FAMILIES.get(str(config.get("model_type"))), self.settings.get("auto_map")
        if code and (isinstance(code, list) or code.get("AutoTokenizer")):
            self.notes.append("tokenizer_config.json: the tokenizer's own code (auto_map) is not run; tokenizer.json is read")
            return (named if named in _BUILT else _AS_FILED[0]), True
        if named and (family == _AS_FILED[0] or config.get("model_type") == "qwen2"):
            return str(family), True
        return named or family or _AS_FILED[0], bool(named)

    def _built_class(self, filed: tokenizers.Tokenizer, name: str, is_named: bool) -> str:
        """Returns the name of a class of `_BUILT`; empty where tokenizer.json is taken as it is."""
        if name in _AS_FILED:
            return ""
        if name not in _BUILT:
            known = f"PreTrainedTokenizerFast, {', '.join(_BUILT)}"
            raise self.refusal(f"{_CONFIG}: tokenizer_class", f"one of {known}; {name} may read text otherwise than they do")
        model, kind = filed.model, type(filed.model).__name__
        if kind != "BPE" and not is_named:
            self.notes.append(f"tokenizer.json holds a {kind} model, of which {name}, the family's, is not made; it is taken as it is")
            return ""
        if kind != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
            raise self.refusal("tokenizer.json: model", f"BPE without marks on subwords, of which {name} is made; found {kind}")
        return name

    def _add_tokens(self, filed: tokenizers.Tokenizer, defaults: Mapping[str, str | None], again: bool) -> None:
        """Declares the special tokens and adds all tokens beside the vocabulary, in transformers' order, on which ids depend.

        ``again``: the class adds its special tokens a second time, without their flags.
        """
        given = dict(self.settings)
        declared, own = self._declared(filed, given)
        self._at = f"{_CONFIG}: {', '.join(_NAMED)}, {_EXTRA}"
        found = _special(given, own, {str(token): token for token in declared.values()}, defaults)
        if not isinstance(several := given.get(_EXTRA, given.get(_ADDITIONAL)) or [], list):
            raise TypeError(f"{several!r} is no list")
        values = [*found.values(), *map(_token, several)]
        self.named, self.special = {key: str(token) for key, token in found.items()}, list(dict.fromkeys(map(str, values)))
        adding = [declared[index] for index in sorted(declared)]
        present = {*(token.content for token in self.backend.get_added_tokens_decoder().values()), *map(str, adding)}
        adding += [token for token in values if str(token) not in present]
        self.backend.add_tokens([_added(token, str(token) in self.named.values()) for token in adding])
        if again:
            self.backend.add_tokens([AddedToken(token, special=True) for token in self.special])

    def _declared(self, filed: tokenizers.Tokenizer, given: dict[str, Any]) -> tuple[dict[int, AddedToken], dict[str, Any]]:
        """Returns the tokens that are added, by id, and those that have names of the model's own, which it takes out of ``given``."""
        if _ADDITIONAL in given:
            given.setdefault(_EXTRA, given.pop(_ADDITIONAL))
        saved = given.pop("model_specific_special_tokens", None) or {}
        own = {key: given.pop(key) for key in [*given] if _is_own(key) and isinstance(given[key], str)} | _by_name(given) or saved
        self._at = f"{_CONFIG}: {_DECODER}"
        if _DECODER in given:
            return {int(index): AddedToken(**token) for index, token in given[_DECODER].items()}, own
        older = self._older(given)
        return older | dict(filed.get_added_tokens_decoder()), own | _by_name(given)

    def _older(self, given: dict[str, Any]) -> dict[int, AddedToken]:
        """Puts what special_tokens_map.json says into ``given``; returns the tokens of added_tokens.json by id."""
        self._at = "special_tokens_map.json"
        for key, value in self.read(self._at).items():
            if not key.endswith("_token") and key not in (_EXTRA, _ADDITIONAL):
                raise self.refusal(f"{self._at}: {key}", "special tokens alone; anything else belongs in tokenizer_config.json")
            if isinstance(value, list) and key == _EXTRA:
                known = given.get(_EXTRA) or []
                given[key] = [*known, *(token for token in map(_as_special, value) if token not in known)]
            else:
                given[key] = value if key == _EXTRA else _as_special(value)
        special = {str(given[key]) for key in _NAMED if given.get(key)} | set(map(str, given.get(_EXTRA) or ()))
        self._at = "added_tokens.json"
        return {at: AddedToken(text, normalized=text not in special, special=text in special) for text, at in self.read(self._at).items()}

    def _around(self) -> tuple[list[int], list[int]]:
        """Returns the ids that go before and behind a text: the post-processor's, and the BOS that ``add_bos_token`` asks for."""
        bos, asked = self.backend.token_to_id(self.named.get("bos_token", "")), self.settings.get("add_bos_token")
        for encoding in map(self.backend.encode, ("a", " a", *self.special)):
            inside = [at for at, part in enumerate(encoding.sequence_ids) if part is not None]
            if inside:
                before, behind = encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]
                if asked is True and bos is not None and bos not in before:
                    before = [bos, *before]
                if asked is False and str(self.settings.get("tokenizer_class")).startswith("LlamaTokenizer"):  # as SGLang has it
                    before = [token for token in before if token != bos]
                return before, behind
        return [], []


def _built(name: str, filed: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str | None]]:
    """Returns what a class builds around a vocabulary, and its special tokens where the checkpoint names none."""
    model, space, is_llama = filed.model, settings.get("add_prefix_space"), name == "LlamaTokenizer"
    model.unk_token, model.dropout, model.ignore_merges, model.fuse_unk, model.byte_fallback = None, None, False, is_llama, is_llama
    built = tokenizers.Tokenizer(model)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=bool(space), use_regex=name not in _QWEN)
    built.decoder, built.pre_tokenizer = decoders.ByteLevel(), bytewise
    if filed.post_processor is not None:
        built.post_processor = filed.post_processor
    if is_llama:
        scheme = "never" if space is False else "always" if settings.get("legacy") else "first"
        built.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
        strip = [] if space is False else [decoders.Strip(" ", 1)]
        built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
        return built, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    if name in _QWEN:
        built.normalizer = normalizers.NFC()
        built.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN[name]), "isolated"), bytewise])
        return built, dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
    return built, {**dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"), "pad_token": None}


def _special(
    given: Mapping[str, Any], own: Mapping[str, Any], declared: Mapping[str, AddedToken], defaults: Mapping[str, str | None]
) -> dict[str, AddedToken | str]:
    """Returns the special tokens by name: those that every model may have, then the model's own."""
    found: dict[str, AddedToken | str] = {}
    for key in _NAMED:
        if (value := given.get(key, defaults.get(key))) is not None:
            found[key] = declared.get(str(_token(value)), _token(value)) if key in given else value
    own = {key: value for key, value in given.items() if _is_own(key) and _is_token(value)} | dict(own)
    return found | {key: _token(value) for key, value in own.items()}


def _by_name(given: dict[str, Any]) -> dict[str, Any]:
    return given.pop(_EXTRA) if isinstance(given.get(_EXTRA), dict) else {}


def _as_special(value: Any) -> Any:
    return AddedToken(**{**value, "special": True}) if isinstance(value, dict) else value


def _is_own(key: str) -> bool:
    return key.endswith("_token") and key not in _NAMED and not key.startswith("add_")


def _is_token(value: Any) -> bool:
    return isinstance(value, str | AddedToken) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _token(value: Any) -> AddedToken | str:
    if not _is_token(value):
        raise TypeError(f"expected text, or an object whose __type is AddedToken, found {value!r}")
    return AddedToken(**{key: entry for key, entry in value.items() if key != "__type"}) if isinstance(value, dict) else value


def _added(token: AddedToken | str, is_named: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    token.special = token.special or is_named
    return token


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
        return np.frombuffer(array("i", [*self.lacks(ids, begin), *ids] if begin else ids), dtype=np.int32)

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
        return [len(one) + (len(self.lacks(one.ids, True)) if begun else 0) for one, begun in zip(encodings, begins, strict=True)]

    def lacks(self, ids: Sequence[int], begin: bool) -> list[int]:
        """Returns what is to be put before the ids of a text that begins: the ``text_prefix``, unless they begin with it."""
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
