"""MessagePack on the wire, with numpy arrays as raw little-endian bytes.

An array travels as a map ``{"dtype": "<i4", "shape": [n], "data": bytes}`` and is read back as a read-only view of the received
buffer (no copy). Nothing here can execute code: only the dtypes of `ARRAY_DTYPES` are accepted. Nothing here takes much more memory than it
was sent either: a byte may stand for an empty map of 64.
"""

import math
import threading
from typing import Any

import msgpack
import numpy as np

from shared.runtime.errors import BadMessage

ARRAY_DTYPES = frozenset({"<i2", "<i4", "<i8", "<f4", "<f8", "|u1"})
_ARRAY_KEYS = frozenset({"dtype", "shape", "data"})
_DTYPES = {name: np.dtype(name) for name in ARRAY_DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


# The memory that lists and maps may take when a message is decoded: so many bytes, and so many more for each byte of the message
ROOM, ROOM_PER_BYTE = 32 << 20, 8

# What they take, about: a list and each item of it, a map and each entry of it; arrays, texts and bytes take what they were sent as
_LIST, _ITEM, _MAP, _ENTRY = 56, 40, 64, 120
SPARE = 1 << 16  # Of that memory, what is left to the message around a value that is to travel
_WORST_PER_BYTE = _ITEM + _MAP  # What a byte can take at most: an empty map in a list (an entry of a map has two bytes at least)

# Bytes of a message up to which nothing in it needs to be counted: whatever it holds has room
COUNTED_FROM = ROOM // (_WORST_PER_BYTE - ROOM_PER_BYTE)


def array(value: np.ndarray[Any, Any], dtype: np.dtype[Any] | None = None) -> dict[str, Any]:
    """Returns the map that stands for an array in a message. `pack` calls it by itself where it meets an array.

    Args:
        dtype: the type to convert the array to; by default it stays.

    Raises TypeError for a dtype that does not travel.
    """
    if dtype is not None and value.dtype is not dtype:
        value = value.astype(dtype)
    name = _NAMES.get(value.dtype)
    if name is None:
        name = value.dtype.newbyteorder("<").str
        if name not in ARRAY_DTYPES:
            raise TypeError(f"arrays of dtype {value.dtype} do not travel; use one of {sorted(ARRAY_DTYPES)}")
        value = value.astype(name)
    # a view where the bytes lie in row order as they are: the packer copies them itself
    data = value.data if value.ndim == 1 and value.flags.c_contiguous else value.tobytes()
    return {"dtype": name, "shape": list(value.shape), "data": data}


def _encode_array(value: object) -> dict[str, Any]:
    if isinstance(value, np.ndarray):
        return array(value)
    if isinstance(value, np.integer):
        return int(value)  # type: ignore[return-value]
    if isinstance(value, np.floating):
        return float(value)  # type: ignore[return-value]
    raise TypeError(f"{type(value).__name__} does not travel in a message")


class _Room:
    """The memory that is left for what one message decodes to."""

    __slots__ = ("_left",)

    def __init__(self, size: int, spare: int = 0) -> None:
        self._left = ROOM + ROOM_PER_BYTE * size - spare

    def list(self, items: list[Any]) -> list[Any]:
        self._take(_LIST + _ITEM * len(items))
        return items

    def map(self, entries: dict[Any, Any]) -> Any:
        self._take(_MAP + _ENTRY * len(entries))
        return _decode_array(entries)

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise BadMessage("lists and maps that would take far more memory than they were sent in")


def _decode_array(mapping: dict[Any, Any]) -> Any:
    if len(mapping) != 3 or mapping.keys() != _ARRAY_KEYS:
        return mapping
    dtype, shape, data = mapping["dtype"], mapping["shape"], mapping["data"]
    known = _DTYPES.get(dtype) if type(dtype) is str else None
    if known is None or type(data) is not bytes or type(shape) is not list:
        raise BadMessage(f"array of dtype {dtype!r}: expected raw bytes of one of {sorted(ARRAY_DTYPES)}")
    if len(shape) == 1 and type(shape[0]) is int and shape[0] * known.itemsize == len(data):  # nearly always
        return np.frombuffer(data, known)
    if any([type(n) is not int or n < 0 for n in shape]) or math.prod(shape) * known.itemsize != len(data):
        raise BadMessage(f"array of shape {shape} and dtype {dtype} does not fit its {len(data)} bytes")
    return np.frombuffer(data, known).reshape(shape)


class _Packers(threading.local):
    """One packer for each thread: its buffer, a quarter of a megabyte, is not made anew for each message."""

    def __init__(self) -> None:
        self.strict = msgpack.Packer(default=_encode_array, use_bin_type=True)
        # a surrogate (from the JSON of an environment, the name of a file) travels spelled out: no text keeps a message from being sent
        self.packer = msgpack.Packer(default=_encode_array, use_bin_type=True, unicode_errors="backslashreplace")


_packers = _Packers()


def pack(value: object) -> bytes:
    """Encodes plain data (maps, lists, strings, numbers, bytes, numpy arrays of `ARRAY_DTYPES`).

    Raises TypeError for anything else.
    """
    return bytes(_packers.packer.pack(value))


def exact_size(value: object) -> int:
    """Returns how many bytes `pack` makes of plain data that is to travel as it is.

    Raises TypeError, ValueError or OverflowError for what does not, half a surrogate pair among it; BadMessage for what nobody can unpack.
    """
    packed = _packers.strict.pack(value)
    if len(packed) > COUNTED_FROM // 2:
        unpack(packed, SPARE)
    return len(packed)


def is_schema(found: Any, schema: int) -> bool:
    """Returns whether what was unpacked where a schema's number belongs is that number; an array cannot be asked whether it equals one."""
    return type(found) is int and found == schema


def unpack(data: bytes, spare: int = 0) -> Any:
    """Decodes what `pack` made. Raises BadMessage for bytes that are not MessagePack, hold a malformed array, or unpack to too much, in
    memory without ``spare`` bytes."""
    room = _Room(len(data), spare) if spare or len(data) > COUNTED_FROM else None
    on_map, on_list = (_decode_array, None) if room is None else (room.map, room.list)
    try:
        return msgpack.unpackb(data, object_hook=on_map, list_hook=on_list, raw=False, strict_map_key=True)
    except BadMessage:
        raise
    except Exception as error:  # msgpack raises many kinds; all mean the same to a receiver
        raise BadMessage(f"{len(data)} bytes that are not MessagePack: {error}") from error
