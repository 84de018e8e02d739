"""Rows of files by number, each an object with keys: one file (`shared.jsonl`, `shared.parquet`), or slices of several in a row."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from shared.data_files import DataFile
from shared.errors import ConfigError


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

    def text(self, row: int, key: str) -> str:
        """The text under ``key``. Raises ConfigError with file, line, key and the keys that are there."""
        value = self.require(row, key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.field}:{key}", self.where(row), f"expected text, found {value!r}")
        return value

    def require(self, row: int, key: str) -> Any:
        """Whatever is under ``key``; raises ConfigError where the key is absent."""
        return self.value(row, self[row], key)

    def value(self, row: int, entry: dict[str, Any], key: str) -> Any:
        """As `require`, of a row that was read already."""
        if key not in entry:
            raise ConfigError(f"{self.field}:{key}", self.where(row), f"the line has no key {key!r}; its keys are {sorted(entry)}")
        return entry[key]


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
    from shared.jsonl import JsonLines  # both build on this module
    from shared.parquet import ParquetRows

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
