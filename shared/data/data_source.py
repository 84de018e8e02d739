"""Prompts from a custom source: ``data.data_source = "package.module:make"``.

``make(config)`` returns an object with ``get_samples(n)``: a list of n prompts, each an object with the keys of [data] or something with
the attributes ``prompt``, ``label`` and ``metadata``; a list of such (slime's groups) counts as its first. A source may also have
``state()``, a JSON value, and ``load_state(value)``.

A source need not be reproducible, but a group's prompt must be. So each drawn prompt is written, with its number and the source's state
after it, to ``prompts/drawn.jsonl`` in the run's directory before it is used, and read from there afterwards. Another buffer reads that
file and continues from the last state; a source without states is first asked for as many prompts as were drawn before.
"""

import json
import os
from array import array
from typing import Any

from shared.config.run_config import RunConfig
from shared.data.prompts import BAD, OVERLONG, Prompt, PromptReader, TrainingPrompts, reason_to_leave_out
from shared.data.rows import RowEntry
from shared.data.tokenizer import Tokenizer
from shared.hooks import loading
from shared.runtime.errors import ConfigError

FIELD = "data.data_source"

REPLAYED_AT_ONCE = 256
"""The prompts that a source without states is asked for at once, to skip those that were drawn before."""

MOST_LEFT_OUT = 10_000
"""The most consecutive prompts that may be left out before the source is given up."""


class DrawnFile:
    """The prompts in a run's file of drawn ones, by number; it grows while it is used, by other processes too.

    A line: ``{"number", "drawn", "left_out", "state", "entry"}``. A line that is cut off (its writer was killed) does not count, and of two
    with the same number only the first does.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = config.run.root / "prompts" / "drawn.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise ConfigError("run.dir", str(self.path), f"cannot be written: {error.strerror}; drawn prompts are kept there") from None
        self._offsets = array("q")
        self._end = 0
        self.last: dict[str, Any] = {"drawn": 0, "left_out": {OVERLONG: 0, BAD: 0}, "state": None}

    def __len__(self) -> int:
        return len(self._offsets)

    def entry(self, index: int) -> RowEntry:
        """Returns the prompt that was drawn as number ``index``."""
        self._file.seek(self._offsets[index])
        return RowEntry(json.loads(self._file.readline())["entry"], FIELD, lambda: f"{self.path}: prompt {index}")

    def catch_up(self) -> bool:
        """Reads the lines written since the last call. Returns whether there were any."""
        before = len(self)
        self._file.seek(self._end)
        while (line := self._file.readline()).endswith(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:  # cut off, and ended by the next writer
                record = {"number": -1}
            if record["number"] == len(self):
                self._offsets.append(self._end)
                self.last = {key: record[key] for key in ("drawn", "left_out", "state")}
            self._end += len(line)
        return len(self) > before

    def append(self, record: dict[str, Any]) -> None:
        """Writes a prompt; it counts when `catch_up` has read it."""
        line = json.dumps(record).encode() + b"\n"
        self._file.seek(0, os.SEEK_END)
        if self._file.tell() > self._end:  # half a line is there
            line = b"\n" + line
        self._file.write(line)
        self._file.flush()


class DrawnPrompts:
    """The prompts of a custom source. Raises ConfigError."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        assert config.data.data_source is not None  # only made for runs that have one
        self._config, self._make = config, loading.load(FIELD, config.data.data_source)
        self._reader = PromptReader(config, tokenizer)
        self._drawn = DrawnFile(config)
        self._drawn.catch_up()
        self._source: Any = None
        self.first_left_out: ConfigError | None = None

    def __len__(self) -> int:
        return len(self._drawn)

    @property
    def left_out(self) -> dict[str, int]:
        """Returns how many prompts were left out so far, by reason."""
        counts: dict[str, int] = self._drawn.last["left_out"]
        return counts

    def at(self, index: int) -> Prompt:
        """Returns the prompt of the group that was admitted as ``index``, drawn now if it never was. Raises ConfigError."""
        while index >= len(self._drawn):
            if self._drawn.catch_up():
                self._source = None  # another buffer has drawn: ours is behind
            elif self._source is None:
                self._source = self._resumed()
            else:
                self._draw()
        return self._reader.read(self._drawn.entry(index))

    def _resumed(self) -> Any:
        """Returns the source, continued after the last prompt that was drawn."""
        source, last = self._make(self._config), self._drawn.last
        if not hasattr(source, "get_samples"):
            raise self._refusal(f"its {type(source).__name__} has no get_samples(n)")
        if last["state"] is not None and hasattr(source, "load_state"):
            source.load_state(last["state"])
        else:
            for first in range(0, last["drawn"], REPLAYED_AT_ONCE):
                source.get_samples(min(REPLAYED_AT_ONCE, last["drawn"] - first))
        return source

    def _draw(self) -> None:
        number, drawn, left_out = len(self._drawn), self._drawn.last["drawn"], dict(self._drawn.last["left_out"])
        for _ in range(MOST_LEFT_OUT):
            candidate = self._candidate(number)
            drawn += 1
            try:
                self._reader.read(candidate)
            except ConfigError as error:
                reason = reason_to_leave_out(error, self._config.data)
                if reason is None:
                    raise
                left_out[reason] += 1
                self.first_left_out = self.first_left_out or error
                continue
            self._write({"number": number, "drawn": drawn, "left_out": left_out, "entry": candidate.values})
            return
        raise self._refusal(f"{MOST_LEFT_OUT} prompts in a row do not fit; the last: {self.first_left_out}")

    def _write(self, record: dict[str, Any]) -> None:
        number = record["number"]
        record["state"] = self._source.state() if hasattr(self._source, "state") else None
        try:
            self._drawn.append(record)
        except TypeError as error:
            raise self._refusal(f"prompt {number} or the state behind it is not JSON: {error}") from None
        if not self._drawn.catch_up():
            raise self._refusal(f"prompt {number} could not be read back from {self._drawn.path}")
        if len(self._drawn) != number + 1 or self._drawn.last["drawn"] != record["drawn"]:
            self._source = None  # another buffer was faster: its prompt counts

    def _candidate(self, number: int) -> RowEntry:
        """Returns the next prompt that the source gives."""
        samples = given = self._source.get_samples(1)
        while isinstance(given, list) and given:
            given = given[0]
        if not isinstance(samples, list) or given is None or isinstance(given, list):
            raise self._refusal(f"get_samples(1) gave {samples!r} for prompt {number}; it must give a list of one")
        if not isinstance(given, dict):
            data, sample = self._config.data, given
            keys = {"prompt": data.input_key, "label": data.label_key, "metadata": data.metadata_key, "tools": data.tool_key}
            given = {key: getattr(sample, name) for name, key in keys.items() if key is not None and hasattr(sample, name)}
        return RowEntry(given, FIELD, lambda: f"{self._config.data.data_source}: prompt {number}")

    def _refusal(self, expected: str) -> ConfigError:
        return ConfigError(FIELD, self._config.data.data_source, expected)


PromptStream = TrainingPrompts | DrawnPrompts
"""The prompt of each training group: the same for the same number, after any restart."""
