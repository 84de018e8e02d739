"""The scalars of TensorBoard's event files, read as they grow: by those who have no TensorBoard.

A file is a row of records, each ``uint64 length, uint32 checksum, length bytes, uint32 checksum``, all little-endian (TFRecord). A record
is an ``Event`` of TensorBoard's event.proto; of its fields wall_time (1), step (2) and summary (5) matter here, and of a summary's values
tag (1) and simple_value (2). Checksums are not compared: a record that is not whole, or is no event, ends what is read of its file.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PATTERN = "events.out.tfevents.*"

MAX_RECORD = 1 << 24
"""The bytes of the largest record that is read: one of scalars has about a hundred."""

MAX_READ = 1 << 26
"""The most bytes of one file that are read at a time."""

_LENGTH, _CHECK, _DOUBLE, _FLOAT = struct.Struct("<Q"), 4, struct.Struct("<d"), struct.Struct("<f")
_VARINT, _64_BIT, _BYTES, _32_BIT = 0, 1, 2, 5
_SIZES = {_64_BIT: 8, _32_BIT: 4}

_WALL_TIME, _STEP, _SUMMARY = (1, _64_BIT), (2, _VARINT), (5, _BYTES)
_VALUE = (1, _BYTES)
_TAG, _SIMPLE_VALUE = (1, _BYTES), (2, _32_BIT)


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number. ``at``: seconds since the epoch."""

    tag: str
    step: int
    value: float
    at: float


@dataclass
class EventDirectory:
    """The event files of one directory, not of those below it.

    ``unreadable``: name of a file → why nothing more is read of it.
    """

    path: Path
    unreadable: dict[str, str] = field(default_factory=dict)
    _offsets: dict[str, int] = field(default_factory=dict)

    def read(self) -> Iterator[Scalar]:
        """Yields the scalars that were added since it was last called, file by file in the order in which they were begun."""
        try:
            files = sorted(self.path.glob(PATTERN))
        except OSError:
            files = []
        for file in files:
            if file.name not in self.unreadable:
                yield from self._read(file)

    def _read(self, file: Path) -> Iterator[Scalar]:
        offset = self._offsets.get(file.name, 0)
        try:
            while (data := _part(file, offset)) and (whole := _whole(data)):
                for begin, end in whole:
                    yield from _scalars(data[begin:end])
                    self._offsets[file.name] = offset + end + _CHECK
                offset = self._offsets[file.name]
        except (OSError, ValueError) as error:
            self.unreadable[file.name] = str(error)


def _part(file: Path, offset: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(MAX_READ)


def _whole(data: bytes) -> list[tuple[int, int]]:
    """Returns where the records lie that are whole. Raises ValueError where the first has a length that no record has."""
    found, begin = list[tuple[int, int]](), 0
    while begin + _LENGTH.size + _CHECK <= len(data):
        (length,) = _LENGTH.unpack_from(data, begin)
        if length > MAX_RECORD and found:
            break  # what lies before it is taken first
        if length > MAX_RECORD:
            raise ValueError(f"a record of {length} bytes: not an event file, or a damaged one")
        first = begin + _LENGTH.size + _CHECK
        if first + length + _CHECK > len(data):
            break
        found.append((first, first + length))
        begin = first + length + _CHECK
    return found


def _scalars(record: bytes) -> Iterator[Scalar]:
    at, step, summaries = 0.0, 0, list[bytes]()
    for kind, value in _fields(record):
        if kind == _WALL_TIME:
            (at,) = _DOUBLE.unpack(value)
        elif kind == _STEP:
            step = int.from_bytes(value, "little")
        elif kind == _SUMMARY:
            summaries.append(value)
    for summary in summaries:
        for kind, value in _fields(summary):
            if kind == _VALUE:
                parts = dict(_fields(value))
                if _TAG in parts and _SIMPLE_VALUE in parts:
                    (number,) = _FLOAT.unpack(parts[_SIMPLE_VALUE])
                    yield Scalar(parts[_TAG].decode(errors="replace"), step, number, at)


def _fields(data: bytes) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Yields (number, wire type) and the bytes of each field of a Protocol Buffers message; a varint as eight bytes.

    Raises ValueError for what is none.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield (number, wire), value.to_bytes(8, "little")
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif (size := _SIZES.get(wire, 0)) == 0:
            raise ValueError(f"a field of wire type {wire}: not an event, or a damaged one")
        if at + size > len(data):
            raise ValueError("a field that is cut off: not an event, or a damaged one")
        yield (number, wire), data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number, of at most 64 bits, and where it ends."""
    number = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("a number that is cut off: not an event, or a damaged one")
        number |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return number & (1 << 64) - 1, at
    raise ValueError("a number of more than 64 bits: not an event, or a damaged one")
