"""Prompts from rows of files: text or chat messages, label, metadata, tools, environment; rendered and tokenised without torch.

Those that a run uses are cached, by row, in the run's directory and in the user's cache. The cache is only a shortcut for a run that is
started again: where a file of it is missing, is of other input, or cannot be written, the prompts are filtered again, to the same end.
"""

import bisect
import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.config.data_sections import DataSection
from shared.config.eval_views import EvalView
from shared.config.run_config import RunConfig
from shared.data.chat_template import BrokenTemplate
from shared.data.data_files import DataFile
from shared.data.media import MOST_BYTES, PROCESSOR_FILES, BadMedia, MediaReader
from shared.data.rows import MixedOrder, ReadProgress, RowEntry, Rows, open_rows
from shared.data.tokenizer import Tokenizer, in_call_form
from shared.model.hf_checkpoint import SIDE_FILES, TEMPLATE_FOLDER
from shared.rewards.names import GIVEN
from shared.rewards.reference import Reference, label_problem, label_text
from shared.runtime import user_cache
from shared.runtime.errors import BadMessage, ConfigError, nearest, shown
from shared.runtime.safe_files import parse_json, replace_file
from shared.schema import codec
from shared.schema.message import MAX_PROMPT_BYTES

_FORMAT = 7


class FilteredRows(NamedTuple):
    """The result of filtering prompts.

    rows: those that are used, ascending. left_out: how many are not, by reason. first: what is wrong with the first of them.
    longest: tokens of the longest prompt that is used.
    """

    rows: range | NDArray[np.uint32]
    left_out: dict[str, int]
    first: ConfigError | None
    longest: int


class FilterCache:
    """Keeps the result for the files of a config's ``field``, of ``size`` rows together, under what it depends on: for any run in the
    user's cache and, once this run has a directory, there."""

    def __init__(self, config: RunConfig, field: str, files: list[DataFile], size: int, metadata: Mapping[str, Any] | None = None) -> None:
        self._root, self._size = config.run.root, size
        rollout, reward = config.rollout, config.reward
        limits = (
            rollout.rollout_max_prompt_len,
            config.may_give_rewards,
            reward.rm_type,
            reward.environment_names(),
            config.algorithm.use_opd,
        )
        self._key = fingerprint(
            config.model.hf_checkpoint, files, [_FORMAT, field, limits, dict(metadata or {}), config.data.model_dump(mode="json")]
        )
        self._path, self._cached = self._root / "prompts" / f"{field}.kept", f"{self._key}.kept"

    def get(self, make: Callable[[], FilteredRows]) -> FilteredRows:
        """Returns the result that is kept for exactly this input; where there is none, makes it and keeps it."""
        with contextlib.suppress(OSError):
            if (filtered := self._parsed(self._path.read_bytes())) is not None:
                return filtered
        content = user_cache.read(self._cached) or b""
        if (filtered := self._parsed(content)) is None:
            filtered = make()
            content = self._content(filtered)
            user_cache.write(self._cached, content)
        if self._root.is_dir():  # a run gets its directory when it starts, not before
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(exist_ok=True)
                replace_file(self._path, content)
        return filtered

    def _content(self, filtered: FilteredRows) -> bytes:
        """Returns a line of JSON and the used rows as a bitmap, the first row in the highest bit of the first byte."""
        first = filtered.first and (filtered.first.field, str(filtered.first.value), filtered.first.expected)
        head = {"key": self._key, "left_out": filtered.left_out, "first": first, "longest": filtered.longest}
        used = np.zeros(self._size, np.bool_)
        used[filtered.rows] = True
        return json.dumps(head).encode() + b"\n" + np.packbits(used).tobytes()

    def _parsed(self, content: bytes) -> FilteredRows | None:
        try:
            head, _, bits = content.partition(b"\n")
            known = json.loads(head)
            if known["key"] != self._key or len(bits) != (self._size + 7) // 8:
                return None
            rows = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), count=self._size)).astype(np.uint32)
            return FilteredRows(rows, known["left_out"], known["first"] and ConfigError(*known["first"]), known["longest"])
        except (ValueError, KeyError, TypeError):
            return None


def fingerprint(model: Path, files: Sequence[DataFile], settings: object) -> str:
    """Returns a digest of files by path, size and time, of how the model's folder reads input by content, and of settings, a JSON value.

    Raises OSError for a file that is not there.
    """
    stated = [(str(file), file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files]
    side = [model / name for name in (*SIDE_FILES, *PROCESSOR_FILES)] + sorted((model / TEMPLATE_FOLDER).glob("*.jinja"))
    tokenizer = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in side if path.is_file()]
    return hashlib.sha256(json.dumps([stated, tokenizer, settings], sort_keys=True).encode()).hexdigest()


OVERLONG, BAD = "overlong", "bad"  # The reasons for which a prompt is left out
BATCH = 256  # Prompts that are tokenised together where only their lengths are asked for: the work is shared over processor cores

_NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)


class OverlongPrompt(ConfigError):
    """A prompt of more than ``rollout_max_prompt_len`` tokens."""


class UnknownEnvironment(ConfigError):
    """A prompt that names an environment that the run does not have. It is never skipped: environments may come on resume."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to generate from. ``content`` as it stands in the file, but for absent entries of a chat (`present`).

    ``tokens``: int32 [P], as many for each picture as it takes; ``environment`` scores it.
    ``size``: bytes of content, label and metadata in a message. ``pictures``: PNGs, in the order of their tokens.
    """

    content: str | list[dict[str, Any]]
    tokens: NDArray[np.int32]
    label: str | None
    label_json: bool
    metadata: dict[str, Any]
    environment: str
    size: int = 0
    pictures: tuple[bytes, ...] = ()


class Chat(NamedTuple):
    """A chat's messages, and the chat template's variables beside them."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]


class PromptReader:
    """Makes prompts of rows, as the config's keys, template and length say. ``metadata``: put into each prompt's, over what it has."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, metadata: Mapping[str, Any] | None = None) -> None:
        self._overrides = dict(metadata or {})
        self._data, self._reward, self._tokenizer = config.data, config.reward, tokenizer
        self._max_tokens = config.rollout.rollout_max_prompt_len
        self._environments, self._given = config.reward.environment_names(), config.may_give_rewards
        self._taught = config.algorithm.use_opd
        self._pictures = MediaReader.of(config.model.hf_checkpoint, config.data) if config.data.multimodal_keys is not None else None

    def read(self, entry: RowEntry) -> Prompt:
        """Returns a row's prompt. Raises ConfigError with file, line and key: one of the kinds above where it applies."""
        prompt, text = self._rendered(entry)
        tokens = self._tokenizer.encode(text, self._begins(prompt))
        if self._pictures is not None:
            try:
                pictures = [self._pictures.prepared(data) for data in self._encoded(entry)]
                tokens = self._pictures.rule.expanded(tokens, [picture.tokens for picture in pictures])
            except BadMedia as error:
                raise self._bad_picture(entry, error) from None
            prompt = replace(prompt, pictures=tuple(picture.data for picture in pictures))
            if (size := sum(map(len, prompt.pictures))) > MOST_BYTES:
                raise self._bad_picture(entry, f"expected at most {MOST_BYTES} bytes of pictures as they are stored, found {size}")
        if isinstance(problem := self._length(entry, prompt, len(tokens)), ConfigError):
            raise problem
        return replace(prompt, tokens=tokens)

    def _bad_picture(self, entry: RowEntry, problem: object) -> ConfigError:
        return entry.refusal(next(iter((self._data.multimodal_keys or {}).values()), None), str(problem))

    def _encoded(self, entry: RowEntry) -> list[bytes]:
        """Returns a row's pictures as they stand there. Raises BadMedia, and ConfigError as `content` does."""
        if self._pictures is None:
            return []
        folder = Path(entry.where().rpartition(":")[0]).parent
        return [self._pictures.data_of(given, folder) for given in self._separated(entry)[1]]

    def _separated(self, entry: RowEntry) -> tuple[Any, list[Any]]:
        """Returns what stands in the place of a prompt, and of each of its pictures. Raises ConfigError."""
        content = present(entry.value(self._data.input_key, "data.input_key"))
        if self._pictures is None:
            return content, []
        try:
            return self._pictures.separated(content, entry.values)
        except BadMedia as error:
            raise self._bad_picture(entry, error) from None

    def _picture_tokens(self, entry: RowEntry) -> int | ConfigError:
        """Returns how many tokens a row's pictures take beside one for each, by their headers; or what is wrong with one."""
        try:
            return 0 if self._pictures is None else sum(self._pictures.measured(data) - 1 for data in self._encoded(entry))
        except BadMedia as error:
            return self._bad_picture(entry, error)

    def measure(self, rows: Rows, indices: Sequence[int]) -> list[int | ConfigError]:
        """Returns for each row how many tokens its prompt has, or what `read` would raise; much faster than reading one by one."""
        rendered: list[tuple[RowEntry, Prompt, str] | ConfigError] = []
        for row in indices:
            try:
                entry = rows.entry(row)
                rendered.append((entry, *self._rendered(entry)))
            except ConfigError as error:
                rendered.append(error)
        readable = [item for item in rendered if isinstance(item, tuple)]
        lengths = iter(self._tokenizer.lengths([text for _, _, text in readable], [self._begins(prompt) for _, prompt, _ in readable]))
        return [self._measured(*item[:2], next(lengths)) if isinstance(item, tuple) else item for item in rendered]

    def _measured(self, entry: RowEntry, prompt: Prompt, length: int) -> int | ConfigError:
        more = self._picture_tokens(entry)
        return self._length(entry, prompt, length + more) if isinstance(more, int) else more

    def _begins(self, prompt: Prompt) -> bool:
        """Returns whether a prompt gets what the checkpoint puts before a text: a rendered chat has all that it needs."""
        return self._data.add_special_tokens and not self._data.apply_chat_template and isinstance(prompt.content, str)

    def _rendered(self, entry: RowEntry) -> tuple[Prompt, str]:
        """Returns a prompt without its tokens, and the text to tokenise. Raises ConfigError for anything but its length."""
        data = self._data
        content = self.content(entry)
        metadata = entry.values.get(data.metadata_key) or {}
        if not isinstance(metadata, dict):
            raise entry.refusal(data.metadata_key, f"expected an object, found {shown(metadata)}")
        metadata = {**metadata, **self._tools(entry), **self._overrides}
        label, is_json = self._label(entry)
        try:
            size = codec.exact_size([[[[content, label, metadata]]]])  # as deep as in a payload, of which it becomes a part
        except (TypeError, ValueError, OverflowError, BadMessage) as error:  # an integer over 64 bits, half a surrogate pair, a date
            expected = f"expected text and numbers that MessagePack carries, found {str(error)!r}"
            raise entry.refusal(data.input_key, expected) from None
        environment = self._environment(entry, metadata)
        problem = None if self._given else label_problem(environment, Reference(label, is_json, metadata), taught=self._taught)
        if problem is not None:
            raise entry.refusal(data.label_key or "label_key", problem)
        return Prompt(content, _NO_TOKENS, label, is_json, metadata, environment, size), self._text(entry, content)

    def _tools(self, entry: RowEntry) -> dict[str, Any]:
        """Returns a row's tools as metadata, where slime's functions look for them; none of a text's that are no tools."""
        try:
            return chat_tools(entry, self._data.tool_key)
        except ConfigError:  # refused with the prompt, where a chat template needs them
            return {}

    def _label(self, entry: RowEntry) -> tuple[str | None, bool]:
        key = self._data.label_key
        label: Any = None if key is None else entry.value(key, "data.label_key")
        try:
            return label_text(label)
        except (TypeError, ValueError) as error:  # bytes and dates in Parquet files
            raise entry.refusal(key, f"expected text, a number or another value of JSON's, found {shown(label)} ({error})") from None

    def _environment(self, entry: RowEntry, metadata: dict[str, Any]) -> str:
        """Returns what scores the prompt: what it names itself, as slime has it, else the run's."""
        environment = self._reward.environment_of(metadata.get("rm_type"))
        if environment not in self._environments:
            expected = f"expected a verifier or environment of [reward] ({nearest(str(environment), self._environments)})"
            raise entry.refusal(f"{self._data.metadata_key}.rm_type", f"{expected}, found {environment!r}", UnknownEnvironment)
        if environment == GIVEN and not self._given:
            expected = (
                "expected what scores the prompt's samples, which come without a reward; or give the run an rm_type or a custom_rm_path"
            )
            raise entry.refusal(f"{self._data.metadata_key}.rm_type", expected)
        return environment

    def content(self, entry: RowEntry) -> Any:
        """Returns what stands in the place of a prompt, text or chat messages. Raises ConfigError where nothing does."""
        return self._separated(entry)[0]

    def question(self, entry: RowEntry) -> Any:
        """Returns what a prompt asks, and the SHA-256 of each picture that it shows. Raises ConfigError."""
        content = self.content(entry)
        try:
            names = [hashlib.sha256(picture).hexdigest() for picture in self._encoded(entry)]
        except BadMedia as error:
            raise self._bad_picture(entry, error) from None
        return [content, names] if names else content

    def chat(self, entry: RowEntry) -> Chat | None:
        """Returns what goes through the chat template for a row; None for text that is tokenised as it is. Raises ConfigError."""
        data, content = self._data, self.content(entry)
        if isinstance(content, str) and not data.apply_chat_template:
            return None
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if (problem := chat_problem(messages, pictures=self._pictures is not None)) is not None:
            raise entry.refusal(data.input_key, f"expected text, or a list of chat messages with role and content, {problem}")
        variables = {**data.apply_chat_template_kwargs, **chat_tools(entry, data.tool_key)}
        return Chat(in_call_form(self._tokenizer, messages, variables, keep_text=True), variables)

    def _text(self, entry: RowEntry, content: Any) -> str:
        """Returns what is tokenised: the prompt itself, or what the chat template makes of it."""
        if (chat := self.chat(entry)) is None:
            return str(content)
        try:
            return self._tokenizer.render(*chat)
        except BrokenTemplate:
            raise
        except ConfigError as error:
            raise entry.refusal(self._data.input_key, f"{error.field}: {error.expected}") from None

    def _length(self, entry: RowEntry, prompt: Prompt, length: int) -> int | ConfigError:
        """Returns the length, or what is wrong with it."""
        if not (length and prompt.content):
            return entry.refusal(self._data.input_key, f"expected a prompt that is not empty, found {shown(prompt.content)}")
        if (size := prompt.size + _NO_TOKENS.itemsize * length) > MAX_PROMPT_BYTES:
            parts = "prompt, label, metadata and token ids in one message"
            return entry.refusal(self._data.input_key, f"expected at most {MAX_PROMPT_BYTES} bytes of {parts}, found '{size} bytes'")
        if self._max_tokens is not None and length > self._max_tokens:
            expected = f"expected at most rollout_max_prompt_len = {self._max_tokens} tokens, found '{length} tokens'"
            return entry.refusal(self._data.input_key, expected, OverlongPrompt)
        return length


def chat_problem(messages: object, pictures: bool = False) -> str | None:
    """Returns what was found in the place of a list of chat messages; None for such a list. ``pictures``: whether they may hold some."""
    if isinstance(messages, list) and messages and all(map(_is_chat_message, messages)):
        return None if pictures else _shown_problem(messages)
    first = messages[0] if isinstance(messages, list) and messages else None
    sharegpt = isinstance(first, dict) and {"from", "value"} <= first.keys()
    hint = " (these are ShareGPT's from and value: rename them, human to user and gpt to assistant)" if sharegpt else ""
    return f"found {repr(messages)[:100]}{hint}"


def _shown_problem(messages: list[dict[str, Any]]) -> str | None:
    parts = [part for message in messages if isinstance(content := message.get("content"), list) for part in content]
    kinds = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    shows = [kind for kind in kinds if kind.startswith(("image", "video", "audio", "input_audio"))]
    return f"found a part of type {shows[0]!r}: data.multimodal_keys has prompts show pictures" if shows else None


def _is_chat_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and ("content" in message or bool(message.get("tool_calls")))


def present(value: Any) -> Any:
    """Returns chat messages or tools without the entries that are null: in a table each object has the keys of all.

    Null stays as a message's ``content``, as ``default`` or ``const`` of a schema that allows null, and in lists of plain values (enum).
    """
    if isinstance(value, list):
        of_objects = any(isinstance(item, dict) for item in value)
        return [present(item) for item in value if item is not None or not of_objects]
    if not isinstance(value, dict):
        return value
    meant = {"content"} if isinstance(value.get("role"), str) else {"default", "const"} if _allows_null(value) else ()
    return {key: present(item) for key, item in value.items() if item is not None or key in meant}


def _allows_null(schema: Any) -> bool:
    """Returns whether a JSON schema allows null."""
    if not isinstance(schema, dict):
        return False
    kinds, values, choices = schema.get("type"), schema.get("enum") or (), [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    nullable = schema.get("nullable") is True or kinds == "null" or (isinstance(kinds, list) and "null" in kinds)  # the first is OpenAPI's
    return nullable or None in values or any(map(_allows_null, choices))


def chat_tools(entry: RowEntry, key: str) -> dict[str, Any]:
    """Returns the template's variable for a row's tools, where it has some: a list, or JSON text of one. Raises ConfigError."""
    tools = entry.values.get(key)
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError:
            raise entry.refusal(key, f"expected a list of tools, or JSON text of one, found {shown(tools)}") from None
    else:
        tools = present(tools)  # what is text has been kept from tables
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise entry.refusal(key, f"expected a list of tools, each an object, found {shown(tools)}")
    return {"tools": tools} if tools else {}


def reason_to_leave_out(error: ConfigError, data: DataSection) -> str | None:
    """Returns why the config leaves out the prompt of this error; None where it refuses the run for it."""
    if isinstance(error, UnknownEnvironment | BrokenTemplate):
        return None
    if isinstance(error, OverlongPrompt):
        return OVERLONG if data.overlong_prompts == "filter" else None
    return BAD if data.bad_prompts == "skip" else None


class PromptFile:
    """The prompts of the files that a config's ``field`` names, by number, without those that the config leaves out.

    ``left_out``: how many are left out, by reason. ``longest``: tokens of the longest prompt that was read one after another, its row the
    ``longest_row`` where `check` has met it.
    Raises ConfigError where nothing is left.
    """

    def __init__(
        self, config: RunConfig, tokenizer: Tokenizer, field: str, files: list[DataFile], metadata: Mapping[str, Any] | None = None
    ) -> None:
        self.rows, self._data = open_rows(files, field), config.data
        self._reader = PromptReader(config, tokenizer, metadata)
        self._leaves_out = config.data.overlong_prompts == "filter" or config.data.bad_prompts == "skip"
        filtered = FilteredRows(range(len(self.rows)), {OVERLONG: 0, BAD: 0}, None, 0)
        if self._leaves_out:
            filtered = FilterCache(config, field, files, len(self.rows), metadata).get(self._filter)
        self._used, self.left_out, self.first_left_out, self.longest = filtered
        self.longest_row: int | None = None

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, index: int) -> Prompt:
        """Returns a prompt. Raises ConfigError with file, line, key and what is expected."""
        return self._reader.read(self.entry(index))

    def entry(self, index: int) -> RowEntry:
        """Returns a prompt's row. Raises ConfigError."""
        return self.rows.entry(int(self._used[index]))

    def chat(self, index: int) -> Chat | None:
        """Returns what goes through the chat template for a prompt; None for text that is tokenised as it is. Raises ConfigError."""
        return self._reader.chat(self.entry(index))

    def questions(self, index: int) -> list[Any]:
        """Returns a prompt's content, alone, with its pictures where it has some. Raises ConfigError."""
        return [self._reader.question(self.entry(index))]

    def below(self, row: int) -> int:
        """Returns how many prompts come from the first ``row`` rows."""
        return bisect.bisect_left(self._used, row)

    def check(self, seconds: float = math.inf, most: int | None = None) -> int:
        """Reads prompts once, unless filtering has read them all: at most so many, of a longer file the first ones and a spread of the
        others, for so many seconds. Returns how many were read. Raises ConfigError for the first that does not fit."""
        if self._leaves_out:
            return len(self.rows)
        read = 0
        for batch, lengths in self._lengths(spread(len(self.rows), most or len(self.rows)), seconds):
            for row, length in zip(batch, lengths, strict=True):
                if isinstance(length, ConfigError):
                    raise length
                if length > self.longest:
                    self.longest, self.longest_row = length, row
            read += len(batch)
        return read

    def _lengths(self, indices: Sequence[int], seconds: float = math.inf) -> Iterator[tuple[Sequence[int], list[int | ConfigError]]]:
        """Yields batches of rows, with the tokens of each or what is wrong with it."""
        end = time.monotonic() + seconds
        with ReadProgress(f"reading {self.rows.field}", len(indices)) as progress:
            for first in range(0, len(indices), BATCH):
                batch = indices[first : first + BATCH]
                yield batch, self._reader.measure(self.rows, batch)
                progress.at(first + len(batch))
                if time.monotonic() > end:
                    return

    def _filter(self) -> FilteredRows:
        used, left_out, first, longest = np.ones(len(self.rows), np.bool_), {OVERLONG: 0, BAD: 0}, None, 0
        for batch, lengths in self._lengths(range(len(self.rows))):
            for row, length in zip(batch, lengths, strict=True):
                if isinstance(length, int):
                    longest = max(longest, length)
                    continue
                reason = reason_to_leave_out(length, self._data)
                if reason is None:
                    raise length
                left_out[reason] += 1
                first = first or length
                used[row] = False
        if not used.any():
            raise ConfigError(self.rows.field, f"{len(self.rows)} prompts", f"all are left out; the first: {first}")
        return FilteredRows(np.flatnonzero(used).astype(np.uint32), left_out, first, longest)


def spread(size: int, most: int) -> Sequence[int]:
    """Returns the numbers below ``size``, or ``most`` of them: a tenth at the beginning, the others evenly over the rest to the last."""
    if size <= most:
        return range(size)
    first = most // 10
    return [*range(first), *(first + (size - 1 - first) * step // (most - 1 - first) for step in range(most - first))]


class TrainingPrompts(PromptFile):
    """The run's training prompts, of its files: what a group gets is a function of its number alone. Raises ConfigError."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        data, files = config.data, config.data.prompt_data or []
        super().__init__(config, tokenizer, "data.prompt_data", files)
        sizes = [after - before for before, after in pairwise(map(self.below, self.rows.starts))]
        try:
            self._order = MixedOrder(sizes, [file.weight for file in files], data.rollout_shuffle, data.rollout_seed)
        except ValueError as error:
            raise ConfigError(self.rows.field, ", ".join(map(str, files)), str(error)) from None

    @property
    def epoch_size(self) -> int:
        """Returns how many prompts an epoch has: those of each file as often as its weight says."""
        return self._order.epoch_size

    def at(self, index: int) -> Prompt:
        """Returns the prompt of the group that was admitted as ``index``. Raises ConfigError."""
        return self[self._order.row(index)]


def eval_prompts(view: EvalView, tokenizer: Tokenizer) -> PromptFile:
    """Returns the prompts of a set of held-out ones. Raises ConfigError."""
    return PromptFile(view.config, tokenizer, view.field, view.files, view.metadata)
