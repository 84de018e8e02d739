"""JSONL files read by line number: text on disk, a sparse index in memory that does not grow with the file."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from shared.data import file_kinds
from shared.data.read_progress import ReadProgress
from shared.data.rows import Rows
from shared.runtime.errors import ConfigError

INDEX_ENTRIES = 1 << 20
"""Entries of the index at most: a longer file has one for every second, fourth, … row (16 bytes each)."""

_TOLD = 1 << 16
"""Lines between two looks at the clock while the index is built."""


class JsonLines(Rows):
    """A JSONL file with random access by row (empty lines do not count).

    Args:
        path: the file. field: the config field that named it, for errors. entries: bound of the index.
    """

    def __init__(self, path: Path, field: str, *, entries: int = INDEX_ENTRIES) -> None:
        self.path, self.field = path, field
        self._offsets, self._numbers = array("q"), array("q")  # of every `_stride`-th row: its byte, its line
        self._stride, self._size = 1, 0
        try:
            self._file = path.open("rb")
            if (other := file_kinds.other_than_jsonl(path, self._file.read(file_kinds.LOOKED_AT))) is not None:
                raise ConfigError(field, str(path), f"is {other}")
            self._file.seek(0)
            self._index(entries)
        except OSError as error:
            raise ConfigError(field, str(path), f"cannot be read: {error.strerror}") from None
        if not self._size:
            raise ConfigError(field, str(path), "holds no line; give at least one JSON object")
        self._next = (self._size, 0, 0)  # row, byte and line behind the row read last: reading on needs no search

    def _index(self, entries: int) -> None:
        at = size = 0
        with ReadProgress(f"indexing {self.path.name}", self.path.stat().st_size) as reading:
            for number, line in enumerate(self._file, start=1):
                if not line.isspace():
                    if size % self._stride == 0:
                        if len(self._offsets) == entries:
                            self._offsets, self._numbers = self._offsets[::2], self._numbers[::2]
                            self._stride *= 2
                        if size % self._stride == 0:
                            self._offsets.append(at)
                            self._numbers.append(number)
                    size += 1
                at += len(line)
                if number % _TOLD == 0:
                    reading.at(at)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def line(self, row: int) -> int:
        """The line number in the file, from 1, of a row, from 0."""
        return self._read(row)[1]

    def where(self, row: int) -> str:
        return f"{self.path}:{self.line(row)}"

    def _read(self, row: int) -> tuple[bytes, int]:
        """The text of a row and its line number."""
        if not 0 <= row < self._size:
            raise IndexError(row)
        found, at, number = self._next
        if not row - self._stride < found <= row:
            found = row // self._stride * self._stride
            at, number = self._offsets[row // self._stride], self._numbers[row // self._stride]
        self._file.seek(at)
        while True:
            text = self._file.readline()
            if not text:
                expected = f"has become shorter since it was opened: row {row} of {self._size} is gone"
                raise ConfigError(self.field, str(self.path), expected)
            at += len(text)
            number += 1
            if text.isspace():
                continue
            if found == row:
                self._next = (row + 1, at, number)
                return text, number - 1
            found += 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        text, _ = self._read(row)
        try:
            value = json.loads(text)
        except UnicodeDecodeError as error:
            expected = f"not UTF-8: {error.reason} {error.object[error.start : error.end]!r} at byte {error.start} of the line"
            raise ConfigError(self.field, self.where(row), f"{expected}; if it is Latin-1: iconv -f LATIN1 -t UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(self.field, self.where(row), f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(self.field, self.where(row), f"expected a JSON object, found a {type(value).__name__}")
        return value
