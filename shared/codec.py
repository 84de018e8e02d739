"""MessagePack on the wire, with numpy arrays as raw little-endian bytes.

An array travels as a map ``{"dtype": "<i4", "shape": [n], "data": bytes}`` and is read back as a read-only view of the received
buffer (no copy). Nothing here can execute code: only the dtypes of `ARRAY_DTYPES` are accepted.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from shared.errors import BadMessage

ARRAY_DTYPES = frozenset({"<i4", "<i8", "<f4", "<f8", "|u1"})
_ARRAY_KEYS = frozenset({"dtype", "shape", "data"})


def _encode_array(value: object) -> dict[str, Any]:
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<").str
        if dtype not in ARRAY_DTYPES:
            raise TypeError(f"arrays of dtype {value.dtype} do not travel; use one of {sorted(ARRAY_DTYPES)}")
        return {"dtype": dtype, "shape": list(value.shape), "data": value.astype(dtype, copy=False).tobytes()}
    if isinstance(value, np.integer):
        return int(value)  # type: ignore[return-value]
    if isinstance(value, np.floating):
        return float(value)  # type: ignore[return-value]
    raise TypeError(f"{type(value).__name__} does not travel in a message")


def _decode_array(mapping: dict[Any, Any]) -> Any:
    if mapping.keys() != _ARRAY_KEYS:
        return mapping
    dtype, shape, data = mapping["dtype"], mapping["shape"], mapping["data"]
    if dtype not in ARRAY_DTYPES or not isinstance(data, bytes) or not isinstance(shape, list):
        raise BadMessage(f"array of dtype {dtype!r}: expected raw bytes of one of {sorted(ARRAY_DTYPES)}")
    if not all(isinstance(n, int) and n >= 0 for n in shape) or math.prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise BadMessage(f"array of shape {shape} and dtype {dtype} does not fit its {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def pack(value: object) -> bytes:
    """Encodes plain data (maps, lists, strings, numbers, bytes, numpy arrays of `ARRAY_DTYPES`).

    Raises TypeError for anything else.
    """
    return bytes(msgpack.packb(value, default=_encode_array, use_bin_type=True))


def unpack(data: bytes) -> Any:
    """Decodes what `pack` made. Raises BadMessage for bytes that are not MessagePack or hold a malformed array."""
    try:
        return msgpack.unpackb(data, object_hook=_decode_array, raw=False, strict_map_key=True)
    except BadMessage:
        raise
    except Exception as error:  # msgpack raises many kinds; all mean the same to a receiver
        raise BadMessage(f"{len(data)} bytes that are not MessagePack: {error}") from error
