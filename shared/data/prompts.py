"""Prompts from rows of files: text or chat messages, label, metadata, tools, environment; rendered and tokenised without torch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.config.run_config import RunConfig
from shared.config.sections import VERIFIERS, DataSection, RewardSection
from shared.data.data_files import DataFile, files
from shared.data.filter_cache import FilterCache, FilteredRows
from shared.data.read_progress import ReadProgress
from shared.data.row_bitmap import RowBitmap, RowMarks
from shared.data.row_order import MixedOrder
from shared.data.rows import FileRows, Rows, open_rows
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError, nearest
from shared.schema import codec

OVERLONG, BAD = "overlong", "bad"
"""Why a prompt is left out."""

BATCH = 256
"""Prompts that are tokenised together where only their lengths are asked for: the work is shared over processor cores."""


class OverlongPrompt(ConfigError):
    """A prompt of more than ``rollout_max_prompt_len`` tokens."""


class UnknownEnvironment(ConfigError):
    """A prompt that names an environment that the run does not have. Never skipped: environments may come on resume."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to generate from. ``content`` as it stands in the file; ``tokens``: int32 [P]; ``environment`` scores it."""

    content: str | list[dict[str, Any]]
    tokens: NDArray[np.int32]
    label: str | None
    metadata: dict[str, Any]
    environment: str


@dataclass(frozen=True)
class PromptForm:
    """A prompt without its tokens. ``text``: what is tokenised."""

    content: str | list[dict[str, Any]]
    text: str
    label: str | None
    metadata: dict[str, Any]
    environment: str


class PromptReader:
    """Makes prompts of rows.

    Args:
        data: keys and template. max_tokens: the longest prompt accepted (None: any).
        reward: which environments there are, and which scores prompts that name none.
    """

    def __init__(self, data: DataSection, tokenizer: Tokenizer, max_tokens: int | None, reward: RewardSection) -> None:
        self._data, self._tokenizer, self._max_tokens, self._reward = data, tokenizer, max_tokens, reward
        self._environments = reward.environment_names()

    def read(self, rows: Rows, row: int) -> Prompt:
        """Raises ConfigError with file, line, key and what would be right; of the kinds above where it is one of them."""
        form = self.form(rows, row)
        tokens = self._tokenizer.encode(form.text)
        if (problem := self._length_problem(rows, row, form, len(tokens))) is not None:
            raise problem
        return Prompt(form.content, tokens, form.label, form.metadata, form.environment)

    def measure(self, rows: Rows, numbers: Sequence[int]) -> list[int | ConfigError]:
        """Returns for each row how many tokens its prompt has, or what `read` would raise; much faster than reading one by one."""
        forms: list[PromptForm | ConfigError] = []
        for row in numbers:
            try:
                forms.append(self.form(rows, row))
            except ConfigError as error:
                forms.append(error)
        lengths = iter(self._tokenizer.lengths([form.text for form in forms if isinstance(form, PromptForm)]))
        found: list[int | ConfigError] = []
        for row, form in zip(numbers, forms, strict=True):
            if isinstance(form, PromptForm):
                length = next(lengths)
                found.append(self._length_problem(rows, row, form, length) or length)
            else:
                found.append(form)
        return found

    def form(self, rows: Rows, row: int) -> PromptForm:
        """Returns all of a prompt but its tokens. Raises as `read` does, for anything but its length."""
        data, entry = self._data, rows[row]

        def refuse(key: str | None, value: object, expected: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
            return kind(f"{rows.field}:{key}", rows.where(row), f"expected {expected}, found {value!r}")

        content = rows.value(row, entry, data.input_key, "data.input_key")
        label: Any = rows.value(row, entry, data.label_key, "data.label_key") if data.label_key is not None else None
        metadata = entry.get(data.metadata_key) or {}
        if isinstance(label, int | float) and not isinstance(label, bool):
            label = str(label)
        if label is not None and not isinstance(label, str):
            raise refuse(data.label_key, label, "text or a number")
        if not isinstance(metadata, dict):
            raise refuse(data.metadata_key, metadata, "an object")
        try:
            codec.pack([content, label, metadata])
        except (TypeError, ValueError, OverflowError) as error:  # an integer over 64 bits, half a surrogate pair, a date
            raise refuse(data.input_key, str(error), "text and numbers that MessagePack carries") from None
        environment = self._reward.environment_of(metadata.get("rm_type"))  # the prompt's own, as slime has it, else the run's
        if environment not in self._environments:
            expected = f"a verifier or environment of [reward] ({nearest(str(environment), self._environments)})"
            raise refuse(f"{data.metadata_key}.rm_type", environment, expected, UnknownEnvironment)
        if label is None and environment in VERIFIERS:
            raise refuse(data.label_key or "label_key", None, f"the answer that {environment} compares with: text or a number")
        text = content
        if not isinstance(content, str) or data.apply_chat_template:
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            if not isinstance(messages, list) or not messages or not all(_is_chat_message(message) for message in messages):
                raise refuse(data.input_key, content, "text, or a list of chat messages with role and content" + message_hint(messages))
            tools = entry.get(data.tool_key)
            if isinstance(tools, str):  # as Parquet files often hold them
                try:
                    tools = json.loads(tools)
                except ValueError:
                    raise refuse(data.tool_key, tools, "a list of tools, or JSON text of one") from None
            if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
                raise refuse(data.tool_key, tools, "a list of tools, each an object")
            given = {"tools": tools} if tools else {}
            try:
                text = self._tokenizer.render(messages, {**data.apply_chat_template_kwargs, **given})
            except ConfigError as error:
                raise ConfigError(f"{rows.field}:{data.input_key}", rows.where(row), f"{error.field}: {error.expected}") from None
        return PromptForm(content, text, label, metadata, environment)

    def _length_problem(self, rows: Rows, row: int, form: PromptForm, length: int) -> ConfigError | None:
        field = f"{rows.field}:{self._data.input_key}"
        if not length:
            return ConfigError(field, rows.where(row), f"expected a prompt that is not empty, found {form.content!r}")
        if self._max_tokens is not None and length > self._max_tokens:
            expected = f"expected at most rollout_max_prompt_len = {self._max_tokens} tokens, found '{length} tokens'"
            return OverlongPrompt(field, rows.where(row), expected)
        return None


def message_hint(messages: object) -> str:
    """Returns what else to say of messages that are none: how ShareGPT's are renamed."""
    first = messages[0] if isinstance(messages, list) and messages else None
    if isinstance(first, dict) and {"from", "value"} <= first.keys():
        return " (these are ShareGPT's from and value: rename them, human to user and gpt to assistant)"
    return ""


def _is_chat_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def reason_to_leave_out(error: ConfigError, data: DataSection) -> str | None:
    """Why the config has the prompt of this error left out; None where it has it refused."""
    if isinstance(error, UnknownEnvironment):
        return None
    if isinstance(error, OverlongPrompt):
        return OVERLONG if data.overlong_prompts == "filter" else None
    return BAD if data.bad_prompts == "skip" else None


class PromptFile:
    """The prompts of rows by number, without those that the config has left out.

    Args:
        rows: of one file or several. data, max_tokens, reward: as for `PromptReader`. remembered: where what is left out is kept.

    ``left_out``: how many are left out, by reason. ``longest``: tokens of the longest prompt that `check` or leaving some out has read.
    Raises ConfigError where nothing is left.
    """

    def __init__(
        self,
        rows: Rows,
        data: DataSection,
        tokenizer: Tokenizer,
        max_tokens: int | None,
        reward: RewardSection | None = None,
        remembered: FilterCache | None = None,
    ) -> None:
        self.rows, self._data = rows, data
        self._reader = PromptReader(data, tokenizer, max_tokens, reward or RewardSection())
        self._kept: RowBitmap | None = None
        self.left_out: dict[str, int] = {OVERLONG: 0, BAD: 0}
        self.first_left_out: ConfigError | None = None
        self.longest = 0  # tokens, of the prompts that were read one after another
        if data.overlong_prompts == "filter" or data.bad_prompts == "skip":
            known = remembered.read() if remembered is not None else None
            if known is None:
                known = self._sift()
                if remembered is not None:
                    remembered.write(known)
            self._kept, self.left_out, self.first_left_out, self.longest = known.kept, known.left_out, known.first, known.longest

    def __len__(self) -> int:
        return len(self.rows) if self._kept is None else len(self._kept)

    def __getitem__(self, number: int) -> Prompt:
        """Raises ConfigError with file, line, key and what would be right."""
        return self._reader.read(self.rows, number if self._kept is None else self._kept.row(number))

    def below(self, row: int) -> int:
        """How many prompts come from the first ``row`` rows."""
        return row if self._kept is None else self._kept.below(row)

    def check(self, seconds: float = math.inf, most: int | None = None) -> int:
        """Reads prompts once, those that the config has left out aside. Returns how many were read.

        Args:
            seconds: after which no more are read. most: prompts that are read; of a longer file the first ones and a spread of the others.

        Raises ConfigError for the first that does not fit.
        """
        if self._kept is not None:
            return len(self.rows)
        read = 0
        for batch, found in self._read(spread(len(self.rows), most or len(self.rows)), seconds):
            for length in found:
                if isinstance(length, ConfigError):
                    raise length
                self.longest = max(self.longest, length)
            read += len(batch)
        return read

    def _read(self, numbers: Sequence[int], seconds: float = math.inf) -> Iterator[tuple[Sequence[int], list[int | ConfigError]]]:
        """Yields batches of rows, with the tokens of each or what is wrong with it."""
        end = time.monotonic() + seconds
        with ReadProgress(f"reading {self.rows.field}", len(numbers)) as reading:
            for first in range(0, len(numbers), BATCH):
                batch = numbers[first : first + BATCH]
                yield batch, self._reader.measure(self.rows, batch)
                reading.at(first + len(batch))
                if time.monotonic() > end:
                    return

    def _sift(self) -> FilteredRows:
        marks, left_out, first, longest = RowMarks(len(self.rows)), {OVERLONG: 0, BAD: 0}, None, 0
        for batch, found in self._read(range(len(self.rows))):
            for row, length in zip(batch, found, strict=True):
                if isinstance(length, int):
                    longest = max(longest, length)
                    continue
                reason = reason_to_leave_out(length, self._data)
                if reason is None:
                    raise length
                left_out[reason] += 1
                first = first or length
                marks.leave_out(row)
        kept = marks.kept()
        if not len(kept):
            raise ConfigError(self.rows.field, f"{len(self.rows)} prompts", f"all are left out; the first: {first}")
        return FilteredRows(kept, left_out, first, longest)


def spread(size: int, most: int) -> Sequence[int]:
    """Returns the numbers below ``size``, or ``most`` of them: a tenth at the beginning, the others evenly over the rest to the last."""
    if size <= most:
        return range(size)
    first = most // 10
    return [*range(first), *(first + (size - 1 - first) * step // (most - 1 - first) for step in range(most - first))]


class PromptStream(Protocol):
    """The prompt of each training group: the same for the same number, after any restart."""

    def __len__(self) -> int:
        """How many prompts there are; of a source without end, how many it has given."""

    def at(self, number: int) -> Prompt:
        """The prompt of group ``number``. Raises ConfigError."""

    @property
    def left_out(self) -> dict[str, int]:
        """Prompts that are left out, by reason."""

    @property
    def first_left_out(self) -> ConfigError | None:
        """What is wrong with the first of them that this process has seen."""


class TrainingPrompts:
    """The prompts of files: what a group gets is a function of its number alone.

    Args:
        parts: the files, with their weights. rows: of them.
    """

    def __init__(self, file: PromptFile, parts: list[DataFile], rows: FileRows, data: DataSection) -> None:
        self._file = file
        below = [file.below(row) for row in rows.starts]
        sizes = [after - before for before, after in pairwise(below)]
        try:
            self._order = MixedOrder(sizes, [part.weight for part in parts], data.rollout_shuffle, data.rollout_seed)
        except ValueError as error:
            raise ConfigError(rows.field, ", ".join(map(str, parts)), str(error)) from None

    def __len__(self) -> int:
        return len(self._file)

    def at(self, number: int) -> Prompt:
        return self._file[self._order.row(number)]

    def check(self, seconds: float = math.inf, most: int | None = None) -> int:
        """As of `PromptFile`."""
        return self._file.check(seconds, most)

    @property
    def rows(self) -> Rows:
        """All rows, those that are left out among them."""
        return self._file.rows

    @property
    def longest(self) -> int:
        """As of `PromptFile`."""
        return self._file.longest

    @property
    def left_out(self) -> dict[str, int]:
        return self._file.left_out

    @property
    def first_left_out(self) -> ConfigError | None:
        return self._file.first_left_out


def training_prompts(config: RunConfig, tokenizer: Tokenizer) -> TrainingPrompts:
    """The run's training prompts, of its files. Raises ConfigError."""
    parts = files(config.data.prompt_data)
    rows = open_rows(parts, "data.prompt_data")
    remembered = FilterCache(config, "training", parts)
    file = PromptFile(rows, config.data, tokenizer, config.rollout.rollout_max_prompt_len, config.reward, remembered)
    return TrainingPrompts(file, parts, rows, config.data)


def eval_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptFile | None:
    """The run's held-out prompts; None where the run evaluates nothing. Raises ConfigError."""
    if config.eval.eval_prompt_data is None:
        return None
    parts = files(config.eval.eval_prompt_data)
    rows = open_rows(parts, "eval.eval_prompt_data")
    remembered = FilterCache(config, "heldout", parts)
    return PromptFile(rows, config.data, tokenizer, config.rollout.rollout_max_prompt_len, config.reward, remembered)
