"""Safetensors files as bytes: any dtype, no tensor library, and never more of a file in memory than is being looked at.

The format is that of https://github.com/huggingface/safetensors: a length (8 bytes), a JSON header, the tensors' bytes.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import open_regular, parse_json
from shared.transfer import digest
from shared.transfer.digest import TensorDigest
from shared.transfer.manifest import ITEM_BYTES, checked_sizes, checked_tensor

ByteArray = NDArray[np.uint8]

TensorBytes = tuple[str, tuple[int, ...], ByteArray]  # A tensor as its dtype by torch's name, its shape, and its bytes: uint8 [nbytes]
# The most bytes that a header may have: some hundred thousand tensors. Read as JSON it takes thirty times as much memory.
HEADER_LIMIT = 16 * 1024**2
HASH_THREADS = min(8, os.cpu_count() or 1)  # the threads that hash, pack and unpack, all of which release the interpreter's lock
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class TensorFileBroken(MyxoError):
    """A file is no safetensors file, or not the whole of one."""


class TensorFiles:
    """The tensors of one or several files by name, mapped into memory until nothing refers to them.

    Args:
        writable: whether changes of the bytes go to the files.
        links: whether the files may be symbolic links, as those of the hub's cache are. A directory that another service writes has none.

    Attributes:
        tensors: name → (dtype by torch's name, shape), in the files' order.

    Raises:
        TensorFileBroken: a file is no safetensors file, or a tensor is in two of them.
    """

    def __init__(self, paths: Iterable[Path], *, writable: bool = False, links: bool = False) -> None:
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._bytes: dict[str, ByteArray] = {}
        for path in paths:
            try:
                with open_regular(path, links=links, writable=writable) as file:
                    self._add(np.memmap(file, np.uint8, mode="r+" if writable else "c"))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise TensorFileBroken(f"{path} is no safetensors file: {type(error).__name__}: {error}") from error

    def _add(self, content: ByteArray) -> None:
        size = int.from_bytes(content[:8].tobytes(), "little")
        if len(content) < 8 or size > min(HEADER_LIMIT, len(content) - 8):
            raise ValueError(f"{len(content)} bytes, of which {size} should be its header")
        header = parse_json(content[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        end = first = 8 + size
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            _, dtype, shape = checked_tensor(name, _DTYPES[entry["dtype"]], entry["shape"])
            start, stop = (first + offset for offset in checked_sizes(entry["data_offsets"]))
            if start != end or stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
                raise ValueError(f"{name}: bytes {start} to {stop} of a {dtype} of shape {list(shape)}")
            if name in self.tensors:
                raise ValueError(f"{name} is in another file, too")
            self.tensors[name], self._bytes[name], end = (dtype, shape), content[start:stop], stop
        if end != len(content):
            raise ValueError(f"{len(content)} bytes, {end} by its header")

    def __getitem__(self, name: str) -> ByteArray:
        """Returns a tensor's bytes where they lie: uint8 [nbytes]."""
        return self._bytes[name]

    def digests(self) -> dict[str, TensorDigest]:
        """Reads all tensors and returns their digests."""
        with ThreadPoolExecutor(HASH_THREADS) as threads:
            found = threads.map(digest.of_bytes, self._bytes.values())
            return {name: TensorDigest(*self.tensors[name], value) for name, value in zip(self.tensors, found, strict=True)}


def write(path: Path, tensors: Mapping[str, TensorBytes]) -> int:
    """Writes a file and returns its size in bytes. Tensors with the widest elements come first, so that all lie aligned."""
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
