"""JSONL files read by line number: offsets in memory, text on disk, so that a long file costs 8 bytes a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigError


class JsonLines:
    """A JSONL file with random access by row (empty lines do not count).

    Args:
        path: the file. field: the config field that named it, for errors.
    """

    def __init__(self, path: Path, field: str) -> None:
        self.path, self.field = path, field
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(field, str(path), f"cannot be read: {error.strerror}") from None
        offsets, lines, at = [], [], 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                offsets.append(at)
                lines.append(number)
            at += len(line)
        if not offsets:
            raise ConfigError(field, str(path), "holds no line; give at least one JSON object")
        self._offsets: NDArray[np.int64] = np.asarray(offsets, dtype=np.int64)
        self._lines: NDArray[np.int64] = np.asarray(lines, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def line(self, row: int) -> int:
        """The line number in the file, from 1, of a row, from 0."""
        return int(self._lines[row])

    def where(self, row: int) -> str:
        """``file:line`` of a row."""
        return f"{self.path}:{self.line(row)}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The object of a row. Raises ConfigError with file and line."""
        self._file.seek(int(self._offsets[row]))
        text = self._file.readline()
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(self.field, self.where(row), f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(self.field, self.where(row), f"expected a JSON object, found a {type(value).__name__}")
        return value

    def text(self, row: int, key: str) -> str:
        """The text under ``key``. Raises ConfigError with file, line, key and the keys that are there."""
        value = self.require(row, key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.field}:{key}", self.where(row), f"expected text, found {value!r}")
        return value

    def require(self, row: int, key: str) -> Any:
        """Whatever is under ``key``; raises ConfigError where the key is absent."""
        entry = self[row]
        if key not in entry:
            raise ConfigError(f"{self.field}:{key}", self.where(row), f"the line has no key {key!r}; its keys are {sorted(entry)}")
        return entry[key]
