"""Protocol buffers' wire format for the few messages of the training endpoint, without a library for it.

A message is read by a table, field number → (name, kind, whether it repeats), into a dict; what the table does not name is skipped. Source:
protobuf.dev, "Encoding".
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.runtime.errors import BadMessage

Table = Mapping[int, tuple[str, Any, bool]]
MOST_DEPTH = 8

_TEXT_CHUNK: Table = {1: ("tokens", bytes, False)}
_CHUNK: Table = {1: ("encoded_text", _TEXT_CHUNK, False), 2: ("image", bytes, False), 3: ("dmel", bytes, False)}
_TENSOR: Table = {1: ("dense", bytes, False), 2: ("sparse_csr", bytes, False), 3: ("dtype", int, False), 4: ("shape", int, True)}
_DATUM: Table = {
    1: ("model_input", _CHUNK, True),
    2: ("loss_fn_inputs", {1: ("key", str, False), 2: ("value", _TENSOR, False)}, True),
}
_SETTING: Table = {1: ("number", float, False), 2: ("text", str, False)}
FORWARD_BACKWARD: Table = {
    1: ("model_id", str, False),
    2: ("seq_id", int, False),
    3: ("data", _DATUM, True),
    4: ("loss_fn", str, False),
    5: ("loss_fn_config", {1: ("key", str, False), 2: ("value", float, False)}, True),
    6: ("forward_only", int, False),
    7: ("loss_fn_config_v2", {1: ("key", str, False), 2: ("value", _SETTING, False)}, True),
}


def read(data: bytes | memoryview, table: Table, depth: int = 0) -> dict[str, Any]:
    """Returns a message's fields by name; lists of those that repeat, an absent other one is not there. Raises BadMessage."""
    if depth > MOST_DEPTH:
        raise BadMessage(f"messages within each other, deeper than {MOST_DEPTH}")
    view, found = memoryview(data), dict[str, Any]({name: [] for name, _, repeats in table.values() if repeats})
    for number, wire, value in _fields(view):
        if number not in table:
            continue
        name, kind, repeats = table[number]
        for one in _values(name, kind, wire, value, depth):
            if repeats:
                found[name].append(one)
            else:
                found[name] = one
    return found


def _fields(view: memoryview) -> Iterator[tuple[int, int, Any]]:
    at = 0
    value: Any
    while at < len(view):
        tag, at = _varint(view, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(view, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, at = view[at : at + size], at + size
        elif wire == 2:
            size, at = _varint(view, at)
            value, at = view[at : at + size], at + size
        else:
            raise BadMessage(f"field {number} has the wire type {wire}; expected 0, 1, 2 or 5")
        if at > len(view):
            raise BadMessage(f"field {number} ends {at - len(view)} bytes after its message")
        yield number, wire, value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            raise BadMessage("a number that does not end within its message")
        byte, at = view[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            value &= (1 << 64) - 1
            return (value - (1 << 64) if value >> 63 else value), at
    raise BadMessage("a number of more than ten bytes")


def _values(name: str, kind: Any, wire: int, value: Any, depth: int) -> Iterator[Any]:
    if kind is int and wire == 0:
        yield value
    elif kind is int and wire == 2:  # packed
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            yield one
    elif kind is float and wire == 1:
        yield struct.unpack("<d", value)[0]
    elif kind is bytes and wire == 2:
        yield bytes(value)
    elif kind is str and wire == 2:
        try:
            yield bytes(value).decode()
        except UnicodeDecodeError as error:
            raise BadMessage(f"{name}: expected text in UTF-8 ({error})") from error
    elif isinstance(kind, Mapping) and wire == 2:
        yield read(value, kind, depth + 1)
    else:
        raise BadMessage(f"{name}: the wire type {wire} is not that of this field")


def field(number: int, value: bytes | str | int | float) -> bytes:
    """Returns one encoded field."""
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    if isinstance(value, float):
        return _number(number << 3 | 1) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | 2) + _number(len(data)) + data


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


FLOAT32 = 1


def forward_backward_output(log_probs: list[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Returns an encoded ``ForwardBackwardOutput`` with the log-probs of each datum's targets."""
    offsets = np.cumsum([0, *(values.nbytes for values in log_probs)]).astype("<i8").tobytes()
    tensor = field(1, b"".join(values.astype("<f4").tobytes() for values in log_probs)) + field(2, offsets) + field(3, FLOAT32)
    record = field(2, field(1, "logprobs") + field(2, tensor)) + field(3, len(log_probs))
    named = b"".join(field(3, field(1, name) + field(2, float(value))) for name, value in metrics.items())
    return field(1, "ArrayRecord") + field(2, record) + named


def sample_response(sequences: list[tuple[bool, NDArray[Any], NDArray[Any]]], prompt: NDArray[Any] | None, cached: int) -> bytes:
    """Returns an encoded ``SampleResponse``.

    ``sequences``: whether each ended by itself, its tokens and their log-probs. ``prompt``: log-probs of the prompt, NaN where there is
    none. ``cached``: tokens of the prompt whose keys and values were there already.
    """
    parts = [
        field(1, field(1, int(not stopped)) + field(2, tokens.astype("<i4").tobytes()) + field(3, values.astype("<f4").tobytes()))
        for stopped, tokens, values in sequences
    ]
    if prompt is not None:
        parts.append(field(2, prompt.astype("<f4").tobytes()))
    return b"".join([*parts, field(4, cached)])
