"""Rows of files by number, each an object with keys: JSONL, Parquet, or slices of several files one after the other.

They are used epoch after epoch, each shuffled by seed + epoch, so that a running number alone gives its row. Reading long files shows its
progress (`ReadProgress`).
"""

import bisect
import difflib
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from shared.data.data_files import DataFile
from shared.runtime.errors import ConfigError, shown
from shared.runtime.safe_files import parse_json
from shared.runtime.safe_text import say


class JsonNumber(float):
    """A number with its JSON ``text``: ``0.00001`` is 1e-05 as a float, and a label of ``1e-05`` is not what people answer."""

    text: str

    def __new__(cls, text: str) -> "JsonNumber":
        number = super().__new__(cls, text)
        number.text = text
        return number


_KIND_BYTES = 4096  # The first bytes of a file by which its kind is determined

_MAGIC = {
    b"\x1f\x8b": "compressed with gzip; unpack it: gunzip -k {path}",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it: unzstd {path}",
    b"\xfd7zXZ": "compressed with xz; unpack it: unxz -k {path}",
    b"BZh": "compressed with bzip2; unpack it: bunzip2 -k {path}",
    b"PK\x03\x04": "a zip archive; unpack it and name the file in it",
    b"PAR1": "a Parquet file; give it a name that ends in .parquet",
    b"\xff\xfe": "UTF-16; make UTF-8 of it: iconv -f UTF-16 -t UTF-8 {path} > NEW.jsonl",
    b"\xfe\xff": "UTF-16; make UTF-8 of it: iconv -f UTF-16 -t UTF-8 {path} > NEW.jsonl",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch that: git lfs pull",
}

_ARRAY = "one JSON document, not one object a line; make JSONL of it: jq -c '.[]' {path} > NEW.jsonl"

_TABLE = (
    "a table ({first}), not JSONL; make that of it: python3 -c 'import csv, json, sys; "
    "[print(json.dumps(row)) for row in csv.DictReader(sys.stdin{tabs})]' < {path} > NEW.jsonl"
)


def _other_than_jsonl(path: Path, beginning: bytes) -> str | None:
    """Returns the kind of a file that cannot be JSONL, and how to convert it; None for one that may be JSONL.

    A file of which single lines are wrong may be JSONL: its reader names the line.
    """
    for magic, description in _MAGIC.items():
        if beginning.startswith(magic):
            return description.format(path=path)
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()
    lines = text.splitlines()
    first = lines[0].strip() if lines else b""
    if text[:1] == b"<":
        return f"a web page or XML ({_shown(first)}), not JSONL; download the file itself, not the page that shows it"
    if first == b"{" or (text[:1] == b"[" and not _is_plain_list(first)):
        return _ARRAY.format(path=path)
    for separator, tabs in ((b"\t", ', delimiter="\\t"'), (b",", "")):
        columns = first.count(separator)
        alike = len(lines) > 1 and lines[1].count(separator) == columns and first[:1] not in (b'"', b"[")
        if columns and first[:1] != b"{" and (alike or path.suffix in (".csv", ".tsv")):
            return _TABLE.format(first=_shown(first), path=path, tabs=tabs)
    return None


def _is_plain_list(line: bytes) -> bool:
    """Returns whether a line is a complete list without objects, which is a single wrong line of a JSONL file."""
    try:
        return not any(isinstance(item, dict) for item in parse_json(line))
    except ValueError:
        return False


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))


INDEX_ENTRIES = 1 << 20  # Bound of a JSONL file's index: a longer file has one entry for every second, fourth, … row (16 bytes each)
_REPORT_LINES = 1 << 16  # Lines between two reports of progress while the index is built
_BATCH_ROWS = 8192  # Rows of a Parquet file that are unpacked together

USUAL_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "messages", "conversations", "input", "text")
USUAL_LABELS = ("label", "answer", "ground_truth", "final_answer", "expected_answer", "target", "gold", "solution", "output")
_SYNONYMS = (USUAL_PROMPTS, USUAL_LABELS, ("response", "completion", "output", "answer", "solution"))
"""The usual keys of prompts, labels and responses in data sets."""


@dataclass(frozen=True)
class RowEntry:
    """One row that was read. ``field`` is the config field that named its file; ``where`` tells file and line, for errors."""

    values: dict[str, Any]
    field: str
    where: Callable[[], str]

    def refusal(self, key: str | None, expected: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
        """Returns the error that says what is wrong under ``key``."""
        return kind(f"{self.field}:{key}", self.where(), expected)

    def value(self, key: str, setting: str) -> Any:
        """Returns the value under ``key``. Raises ConfigError where it is absent; ``setting`` is the config field that names the key."""
        if key in self.values:
            return self.values[key]
        keys = sorted(self.values)
        meant = _meant(key, keys)
        hint = f"; add it to the line, or set {setting} to one of them" if meant is None else f"; did you mean {setting} = {meant!r}?"
        raise self.refusal(key, f"the line has no key {key!r}; its keys are {keys}{hint}")

    def text(self, key: str, setting: str) -> str:
        """Returns the text under ``key``. Raises ConfigError as `value` does, and where it is not text."""
        value = self.value(key, setting)
        if not isinstance(value, str):
            raise self.refusal(key, f"expected text, found {shown(value)}")
        return value


def _meant(key: str, keys: list[str]) -> str | None:
    """Returns the key that is probably meant: one that is spelt alike, or a usual name of the same thing."""
    if near := difflib.get_close_matches(key, keys, n=1, cutoff=0.6):
        return near[0]
    usual = next((names for names in _SYNONYMS if key in names), ())
    return next((name for name in usual if name in keys), None)


class Rows(ABC):
    """Rows by number, from 0. ``field`` is the config field that named the file, for errors."""

    field: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, Any]:
        """Returns the object of a row. Raises ConfigError with file and line."""

    @abstractmethod
    def where(self, row: int) -> str:
        """Returns ``file:line`` of a row; the line counts from 1."""

    def entry(self, row: int) -> RowEntry:
        """Returns a row with what its errors say. Raises ConfigError."""
        return RowEntry(self[row], self.field, lambda: self.where(row))


class JsonlRows(Rows):
    """A JSONL file; empty lines do not count. The text stays on disk, and the index in memory is bound by ``entries``.

    Raises ConfigError for a file that cannot be read or is not JSONL.
    """

    def __init__(self, path: Path, field: str, *, entries: int = INDEX_ENTRIES) -> None:
        self.path, self.field = path, field
        self._offsets, self._lines = array("q"), array("q")  # of every `_stride`-th row: its byte, its line
        self._stride, self._size, self._lock = 1, 0, threading.Lock()
        try:
            self._file = path.open("rb")
            if (other := _other_than_jsonl(path, self._file.read(_KIND_BYTES))) is not None:
                raise ConfigError(field, str(path), f"is {other}")
            self._file.seek(0)
            self._index(entries)
        except OSError as error:
            raise ConfigError(field, str(path), f"cannot be read: {error.strerror}") from None
        if not self._size:
            raise ConfigError(field, str(path), "holds no line; give at least one JSON object")
        self._next = (self._size, 0, 0)  # row, byte and line behind the row read last: reading on needs no search

    def _index(self, entries: int) -> None:
        offset = 0
        with ReadProgress(f"indexing {self.path.name}", self.path.stat().st_size) as progress:
            for number, line in enumerate(self._file, start=1):
                if not line.isspace():
                    if self._size % self._stride == 0:
                        self._offsets.append(offset)
                        self._lines.append(number)
                        if len(self._offsets) > entries:
                            self._offsets, self._lines = self._offsets[::2], self._lines[::2]
                            self._stride *= 2
                    self._size += 1
                offset += len(line)
                if number % _REPORT_LINES == 0:
                    progress.at(offset)

    def __len__(self) -> int:
        return self._size

    def where(self, row: int) -> str:
        return f"{self.path}:{self._read(row)[1]}"

    def _read(self, row: int) -> tuple[bytes, int]:
        """Returns the text of a row and its line number, to any thread."""
        if not 0 <= row < self._size:
            raise IndexError(row)
        with self._lock:
            found, offset, number = self._next
            if not row - self._stride < found <= row:
                entry = row // self._stride
                found, offset, number = entry * self._stride, self._offsets[entry], self._lines[entry]
            self._file.seek(offset)
            while text := self._file.readline():
                offset += len(text)
                number += 1
                if text.isspace():
                    continue
                if found == row:
                    self._next = (row + 1, offset, number)
                    return text, number - 1
                found += 1
        raise ConfigError(self.field, str(self.path), f"has become shorter since it was opened: row {row} of {self._size} is gone")

    def __getitem__(self, row: int) -> dict[str, Any]:
        text, _ = self._read(row)
        try:
            value = parse_json(text, JsonNumber, once=True)
        except UnicodeDecodeError as error:
            expected = f"not UTF-8: {error.reason} {error.object[error.start : error.end]!r} at byte {error.start} of the line"
            raise ConfigError(self.field, self.where(row), f"{expected}; if it is Latin-1: iconv -f LATIN1 -t UTF-8") from None
        except ValueError as error:
            raise ConfigError(self.field, self.where(row), f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(self.field, self.where(row), f"expected a JSON object, found a {type(value).__name__}")
        return value


class ParquetRows(Rows):
    """A Parquet file.

    A row group is compressed as a whole, so that rows in shuffled order would each cost the decoding of a group. The file is therefore
    unpacked once into an unnamed Arrow file in the temporary directory (``TMPDIR``), which is mapped: memory stays flat.

    Raises ConfigError for a file that is not Parquet, and where pyarrow is not installed.
    """

    def __init__(self, path: Path, field: str) -> None:
        self.path, self.field = path, field
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise ConfigError(field, str(path), "Parquet files need pyarrow: pip install 'myxo[parquet]'") from None
        try:
            with pyarrow.parquet.ParquetFile(path) as source, tempfile.NamedTemporaryFile(prefix="myxo-prompts-") as unpacked:
                names = source.schema_arrow.names
                if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                    raise ValueError(f"the column {twice[0]!r} is there twice; leave one out")
                self._unpack(pyarrow, source, unpacked.name)
                self._table = pyarrow.ipc.open_file(pyarrow.memory_map(unpacked.name)).read_all()
        except (OSError, pyarrow.ArrowException, ValueError) as error:
            raise ConfigError(field, str(path), f"not a readable Parquet file: {' '.join(str(error).split())}") from None
        kinds: dict[str, Any] = {"float": np.float32, "halffloat": np.float16}
        self._narrow = {column.name: kinds[str(column.type)] for column in self._table.schema if str(column.type) in kinds}
        if not len(self):
            raise ConfigError(field, str(path), "holds no row; give at least one")

    def _unpack(self, pyarrow: Any, source: Any, name: str) -> None:
        # an Arrow file takes one dictionary a column; the groups of a Parquet file have each their own
        is_dictionary, columns = pyarrow.types.is_dictionary, source.schema_arrow
        schema = pyarrow.schema([column.with_type(column.type.value_type) if is_dictionary(column.type) else column for column in columns])
        with (
            pyarrow.OSFile(name, "wb") as sink,
            pyarrow.ipc.new_file(sink, schema) as writer,
            ReadProgress(f"unpacking {self.path.name}", source.metadata.num_rows) as progress,
        ):
            for index, batch in enumerate(source.iter_batches(batch_size=_BATCH_ROWS)):
                writer.write_batch(batch if batch.schema.equals(schema) else batch.cast(schema))
                progress.at(index * _BATCH_ROWS)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def where(self, row: int) -> str:
        return f"{self.path}:{row + 1}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        try:
            entry: dict[str, Any] = self._table.slice(row, 1).to_pylist()[0]
        except ValueError as error:  # text that is not UTF-8
            raise ConfigError(self.field, self.where(row), f"not readable: {error}") from None
        for name, kind in self._narrow.items():  # a label of 0.1 is not 0.10000000149011612
            entry[name] = None if entry[name] is None else float(str(kind(entry[name])))
        return entry


class FileRows(Rows):
    """Slices of files, one after the other. ``parts``: each file with the rows of it that are meant, none of them empty."""

    def __init__(self, parts: Sequence[tuple[Rows, range]], field: str) -> None:
        self.field, self._parts = field, parts
        self.starts = [0]
        for _, rows in parts:
            self.starts.append(self.starts[-1] + len(rows))

    def __len__(self) -> int:
        return self.starts[-1]

    def _find(self, row: int) -> tuple[Rows, int]:
        part = bisect.bisect_right(self.starts, row) - 1
        file, rows = self._parts[part]
        return file, rows[row - self.starts[part]]

    def __getitem__(self, row: int) -> dict[str, Any]:
        file, file_row = self._find(row)
        return file[file_row]

    def where(self, row: int) -> str:
        file, file_row = self._find(row)
        return file.where(file_row)


def open_rows(files: Sequence[DataFile], field: str) -> FileRows:
    """Opens files, each path once. Raises ConfigError for one that cannot be read or whose slice is empty."""
    opened: dict[Path, Rows] = {}
    parts = []
    for file in files:
        if file.path not in opened:
            opened[file.path] = (ParquetRows if file.path.suffix == ".parquet" else JsonlRows)(file.path, field)
        size = len(opened[file.path])
        if not (rows := file.rows(size)):
            raise ConfigError(field, str(file), f"the slice is empty: the file has {size} rows")
        parts.append((opened[file.path], rows))
    return FileRows(parts, field)


_ROUNDS = 6
_MASK = (1 << 64) - 1


class FeistelPermutation:
    """A pseudo-random permutation of ``range(size)`` in constant memory.

    A Feistel network over the least even number of bits that holds ``size``, walked until it lands inside (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"): four steps on average at most.
    """

    def __init__(self, size: int, *seed: int) -> None:
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        self._keys = [int(key) for key in np.random.default_rng(seed).integers(0, _MASK, size=_ROUNDS, dtype=np.uint64, endpoint=True)]

    def __getitem__(self, index: int) -> int:
        while True:
            left, right = index >> self._half, index & self._low
            for key in self._keys:
                mixed = ((right ^ key) * 0x9E3779B97F4A7C15) & _MASK  # the multiplier of splitmix64; its high bits are the mixed ones
                mixed = ((mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9) & _MASK
                left, right = right, left ^ (mixed >> 40 & self._low)
            index = left << self._half | right
            if index < self._size:
                return index


_permutation = lru_cache(maxsize=256)(FeistelPermutation)


class MixedOrder:
    """Rows of several files, one after the other, by running number: an epoch draws from each as often as its weight says.

    File i of n rows gives c = round(weight × n) rows to an epoch: the next c of its own endless sequence of passes over itself. So
    the rows of a file are used equally often, to within one, whatever its weight. With ``shuffle`` the epoch is shuffled as a whole
    by seed + epoch, and each pass over a file whose passes do not end with epochs is shuffled too, by seed, file and pass; without,
    files come one after the other, in file order. Files of weight 1 are used as one file that holds them all.

    Args:
        sizes: rows of each file. weights: of each.

    Raises ValueError where a file with rows has a weight that rounds to none.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], shuffle: bool, seed: int) -> None:
        self._sizes, self._shuffle, self._seed = list(sizes), shuffle, seed
        self.counts = [round(weight * size) for weight, size in zip(weights, sizes, strict=True)]
        for size, count, weight in zip(sizes, self.counts, weights, strict=True):
            if size and not count:
                raise ValueError(f"the weight {weight:g} of {size} prompts rounds to none of them an epoch")
        self._first_rows = list(accumulate(self._sizes, initial=0))  # of each file
        self._first_slots = list(accumulate(self.counts, initial=0))  # of each file in an epoch
        self.epoch_size = self._first_slots[-1]

    def row(self, number: int) -> int:
        """Returns the row (from 0, over all files) that is used as ``number`` (from 0), the same after any restart."""
        epoch, slot = divmod(number, self.epoch_size)
        if self._shuffle:
            slot = _permutation(self.epoch_size, self._seed + epoch)[slot]
        file = bisect.bisect_right(self._first_slots, slot) - 1
        size, count = self._sizes[file], self.counts[file]
        file_pass, row = divmod(epoch * count + slot - self._first_slots[file], size)
        if self._shuffle and count % size:
            row = _permutation(size, self._seed, file, file_pass)[row]
        return self._first_rows[file] + row


PATIENCE_SECONDS = 2.0  # Work that ends sooner shows nothing
LINE_SECONDS = 10.0  # Time between two lines where there is no terminal


class ReadProgress:
    """A context manager that shows the progress of reading.

    Args:
        what: in words. total: where it ends, in the unit of `at`. amount: writes such a number.
    """

    def __init__(self, what: str, total: int, amount: Callable[[int], str] = "{:,}".format) -> None:
        self._what, self._total, self._amount = what, total, amount
        self.shown = False  # True once anything was shown
        self._due = time.monotonic() + PATIENCE_SECONDS
        self._progress: Progress | None = None

    def at(self, done: int) -> None:
        """Shows how much is done. It is cheap, but looks at the clock: call it now and then, not for every line."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done)
        elif time.monotonic() < self._due:
            return
        elif sys.stderr.isatty():
            self.shown = True
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.add_task(self._what, total=self._total, completed=done)
            self._progress.start()
        else:
            self._due, self.shown = time.monotonic() + LINE_SECONDS, True
            progress = f"{self._amount(done)} of {self._amount(self._total)}"
            say(f"myxo: {self._what}: {progress} ({done / max(self._total, 1):.0%})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
