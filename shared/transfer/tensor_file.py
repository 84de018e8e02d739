"""Safetensors files as bytes: any dtype, no tensor library, and never more of a file in memory than is being looked at.

The format is that of https://github.com/huggingface/safetensors: a length (8 bytes), a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shared.runtime.errors import MyxoError
from shared.transfer.manifest import ITEM_BYTES

Bytes = NDArray[np.uint8]

HEADER_LIMIT = 100_000_000
"""Bytes that a header may have, as in the safetensors library."""

_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class TensorFileBroken(MyxoError):
    """A file that is no safetensors file, or not the whole of one."""


class TensorFile:
    """A file's tensors, mapped into memory. A context manager; what was taken out of it keeps the map alive.

    Args:
        writable: changes of the bytes go to the file.

    Attributes:
        tensors: name → (dtype by torch's name, shape), in the file's order.

    Raises TensorFileBroken.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._places: dict[str, tuple[int, int]] = {}
        try:
            self._map: Bytes = np.memmap(path, np.uint8, mode="r+" if writable else "r")
            self._read()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TensorFileBroken(f"{path} is no safetensors file: {type(error).__name__}: {error}") from error

    def _read(self) -> None:
        size = int.from_bytes(self._map[:8].tobytes(), "little")
        if len(self._map) < 8 or size > min(HEADER_LIMIT, len(self._map) - 8):
            raise ValueError(f"{len(self._map)} bytes, of which {size} should be its header")
        header = json.loads(self._map[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        end = first = 8 + size
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], tuple(int(length) for length in entry["shape"])
            start, stop = (first + int(offset) for offset in entry["data_offsets"])
            if start != end or stop - start != math.prod(shape) * ITEM_BYTES[dtype] or min(shape, default=0) < 0:
                raise ValueError(f"{name}: bytes {start} to {stop} of a {dtype} of shape {list(shape)}")
            self.tensors[name], self._places[name], end = (dtype, shape), (start, stop), stop
        if end != len(self._map):
            raise ValueError(f"{len(self._map)} bytes, {end} by its header")

    def __getitem__(self, name: str) -> Bytes:
        """A tensor's bytes, uint8 [nbytes], where they lie."""
        start, stop = self._places[name]
        return self._map[start:stop]

    def flush(self) -> None:
        """Has what was changed written to the disk."""
        assert isinstance(self._map, np.memmap)
        self._map.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._map


def write(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], Bytes]]) -> int:
    """Writes a file; returns its size in bytes.

    Args:
        tensors: name → dtype by torch's name, shape, bytes. Those with the widest elements come first, so that all lie aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # readers that build tensors ask for it
    names = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name][0]])
    offset = 0
    for name in names:
        dtype, shape, data = tensors[name]
        if data.nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{name}: {data.nbytes} bytes for a {dtype} of shape {list(shape)}")
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            file.write(np.ascontiguousarray(tensors[name][2]).data)
    return 8 + len(encoded) + offset
