"""Prompts from a custom source: ``data.data_source = "package.module:make"``, or a class in slime's manner (`shared.data.slime_source`).

``make(config)`` returns an object with ``get_samples(n)``: a list of n prompts, each an object with the keys of [data] or something with
the attributes ``prompt``, ``label`` and ``metadata``; a list of such (slime's groups) counts as its first. A source may also have
``state()``, a JSON value, and ``load_state(value)``.

A source need not be reproducible, but a group's prompt must be. So each drawn prompt is written, with its number and the source's state
after it, to ``prompts/drawn.jsonl`` in the run's directory before it is used, and read from there afterwards. Another buffer reads that
file and continues from the last state; a source without states is first asked for as many prompts as were drawn before.
"""

import json
import os
import threading
from array import array
from typing import Any

from shared.config.run_config import RunConfig
from shared.data.prompts import BAD, OVERLONG, Prompt, PromptReader, TrainingPrompts, reason_to_leave_out
from shared.data.rows import RowEntry
from shared.data.slime_source import RENDERED
from shared.data.source_process import FIELD, SourceProcess
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError

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
    """The prompts of a custom source, which runs in a process of its own. Prompts may be asked for from any thread. Raises ConfigError."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        assert config.data.data_source is not None  # only made for runs that have one
        self._config = config
        self._reader = PromptReader(config, tokenizer)
        as_they_are = config.model_copy(update={"data": config.data.model_copy(update={"apply_chat_template": False})})
        self._rendered_reader = PromptReader(as_they_are, tokenizer)
        self._drawn = DrawnFile(config)
        self._drawn.catch_up()
        self._lock = threading.Lock()
        self._fresh: SourceProcess | None = SourceProcess(config)
        self._source: SourceProcess | None = None
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
        with self._lock:
            while index >= len(self._drawn):
                if self._drawn.catch_up():
                    self._leave()  # another buffer has drawn: ours is behind
                elif self._source is None:
                    self._source = self._resumed()
                else:
                    self._draw(self._source)
            entry = self._drawn.entry(index)
        return self._read(entry)

    def _read(self, entry: RowEntry) -> Prompt:
        rendered = RENDERED in entry.values and isinstance(entry.values.get(self._config.data.input_key), str)
        return (self._rendered_reader if rendered else self._reader).read(entry)

    def _leave(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _resumed(self) -> SourceProcess:
        """Returns the source, continued after the last prompt that was drawn."""
        source, last = self._fresh or SourceProcess(self._config), self._drawn.last
        self._fresh = None
        if last["state"] is not None and source.has_states:
            source.load_state(last["state"])
        else:
            source.skip(last["drawn"])
        return source

    def _draw(self, source: SourceProcess) -> None:
        number, drawn, left_out = len(self._drawn), self._drawn.last["drawn"], dict(self._drawn.last["left_out"])
        for _ in range(MOST_LEFT_OUT):
            try:
                row, state = source.draw()
            except ConfigError:
                self._source = None  # its process has ended
                raise
            candidate = RowEntry(row, FIELD, lambda: f"{self._config.data.data_source}: prompt {number}")
            drawn += 1
            try:
                self._read(candidate)
            except ConfigError as error:
                reason = reason_to_leave_out(error, self._config.data)
                if reason is None:
                    raise
                left_out[reason] += 1
                self.first_left_out = self.first_left_out or error
                continue
            self._write({"number": number, "drawn": drawn, "left_out": left_out, "entry": row, "state": state})
            return
        raise self._refusal(f"{MOST_LEFT_OUT} prompts in a row do not fit; the last: {self.first_left_out}")

    def _write(self, record: dict[str, Any]) -> None:
        number = record["number"]
        try:
            self._drawn.append(record)
        except TypeError as error:
            raise self._refusal(f"prompt {number} or the state behind it is not JSON: {error}") from None
        if not self._drawn.catch_up():
            raise self._refusal(f"prompt {number} could not be read back from {self._drawn.path}")
        if len(self._drawn) != number + 1 or self._drawn.last["drawn"] != record["drawn"]:
            self._leave()  # another buffer was faster: its prompt counts

    def _refusal(self, expected: str) -> ConfigError:
        return ConfigError(FIELD, self._config.data.data_source, expected)


PromptStream = TrainingPrompts | DrawnPrompts
"""The prompt of each training group: the same for the same number, after any restart."""
