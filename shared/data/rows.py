"""Rows of files by number, each an object with keys: one file (`shared.data.jsonl`, `shared.data.parquet`), or slices of several in a
row."""

from __future__ import annotations

import bisect
import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from shared.data.data_files import DataFile
from shared.runtime.errors import ConfigError

_SYNONYMS = (
    ("prompt", "question", "problem", "query", "instruction", "messages", "conversations", "input", "text"),
    ("label", "answer", "ground_truth", "final_answer", "expected_answer", "target", "gold", "solution", "output"),
    ("response", "completion", "output", "answer", "solution"),
)
"""What data sets call prompts, labels and responses."""


class Rows(ABC):
    """Rows by number, from 0. ``field``: the config field that named the file, for errors."""

    field: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, Any]:
        """The object of a row. Raises ConfigError with file and line."""

    @abstractmethod
    def where(self, row: int) -> str:
        """``file:line`` of a row; the line counts from 1."""

    def text(self, row: int, key: str, setting: str | None = None) -> str:
        """The text under ``key``. Raises ConfigError with file, line, key and the keys that are there; ``setting`` as of `value`."""
        value = self.value(row, self[row], key, setting)
        if not isinstance(value, str):
            raise ConfigError(f"{self.field}:{key}", self.where(row), f"expected text, found {value!r}")
        return value

    def value(self, row: int, entry: dict[str, Any], key: str, setting: str | None = None) -> Any:
        """Returns what is under ``key`` of a row that was read already.

        Raises ConfigError where the key is absent; it names ``setting``, the config field that says which key it is.
        """
        if key not in entry:
            expected = f"the line has no key {key!r}; its keys are {sorted(entry)}"
            if setting is not None:
                meant = _meant(key, sorted(entry))
                expected += f"; set {setting} to one of them" if meant is None else f"; did you mean {setting} = {meant!r}?"
            raise ConfigError(f"{self.field}:{key}", self.where(row), expected)
        return entry[key]


def _meant(key: str, keys: list[str]) -> str | None:
    """Returns the key that is probably meant: one that is spelt alike, or a usual name of the same thing."""
    if near := difflib.get_close_matches(key, keys, n=1, cutoff=0.6):
        return near[0]
    usual = next((names for names in _SYNONYMS if key in names), ())
    return next((name for name in usual if name in keys), None)


class FileRows(Rows):
    """Slices of files, one after the other.

    Args:
        parts: each file with the rows of it that are meant, none of them empty.
    """

    def __init__(self, parts: Sequence[tuple[Rows, range]], field: str) -> None:
        self.field = field
        self._parts = list(parts)
        self.starts = [0]
        for _, rows in self._parts:
            self.starts.append(self.starts[-1] + len(rows))

    def __len__(self) -> int:
        return self.starts[-1]

    def _find(self, row: int) -> tuple[Rows, int]:
        part = bisect.bisect_right(self.starts, row) - 1
        file, rows = self._parts[part]
        return file, rows[row - self.starts[part]]

    def __getitem__(self, row: int) -> dict[str, Any]:
        file, own = self._find(row)
        return file[own]

    def where(self, row: int) -> str:
        file, own = self._find(row)
        return file.where(own)


def open_rows(files: Sequence[DataFile], field: str) -> FileRows:
    """Opens files by their ending: ``.parquet``, JSONL otherwise. A file that is named twice is read once.

    Raises ConfigError for one that cannot be read or whose slice is empty.
    """
    from shared.data.jsonl import JsonLines  # both build on this module
    from shared.data.parquet import ParquetRows

    opened: dict[Any, Rows] = {}
    parts = []
    for file in files:
        if file.path not in opened:
            opened[file.path] = ParquetRows(file.path, field) if file.path.suffix == ".parquet" else JsonLines(file.path, field)
        rows = file.rows(len(opened[file.path]))
        if not rows:
            raise ConfigError(field, str(file), f"the slice is empty: the file has {len(opened[file.path])} rows")
        parts.append((opened[file.path], rows))
    return FileRows(parts, field)
