"""Encodes what changed of a tensor between two versions, and applies it to the older one: bits, never arithmetic.

``xor`` stores the exclusive or of old and new, the elements' first bytes before all their second ones: after a small step the leading ones
are zeros. ``overwrite`` stores positions (as distances) and values of the elements that differ; it is shorter where few do.
Everything is compressed with zstd.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import zstandard

from shared.runtime.errors import BadMessage
from shared.transfer.tensor_file import ByteArray

DeltaEncoding = Literal["xor", "overwrite"]
DeltaParts = dict[str, ByteArray]
"""A tensor's change: ``xor`` alone, or ``gaps`` and ``values``; each compressed."""

LEVEL = 1
"""The level of zstd; level 3 saves less than 1 % of such bytes."""

CHUNK_BYTES = 64 * 1024**2
"""The bytes processed at once, so that a large tensor does not need several times its memory. It is part of the format of ``xor``."""

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode_delta(old: ByteArray, new: ByteArray, item: int, encoding: DeltaEncoding) -> DeltaParts:
    """Returns the change from ``old`` to ``new``, empty if there is none.

    Args:
        old, new: uint8 [nbytes], contiguous. item: bytes per element: 1, 2, 4 or 8.
    """
    if np.array_equal(old, new):
        return {}
    if encoding == "xor":
        return {"xor": _packed([_planes(old[part] ^ new[part], item) for part in _chunks(len(old))])}
    before, after = old.view(_WORDS[item]), new.view(_WORDS[item])
    step = CHUNK_BYTES // item
    found = [np.flatnonzero(before[start : start + step] != after[start : start + step]) + start for start in range(0, len(after), step)]
    positions = np.concatenate(found)
    gaps = np.diff(positions, prepend=-1) - 1
    width = 4 if gaps.max() < 2**32 else 8
    as_bytes = gaps.astype(f"<u{width}").view(np.uint8)
    return {f"gaps{8 * width}": _packed([_planes(as_bytes, width)]), "values": _packed([_planes(after[positions].view(np.uint8), item)])}


def apply_delta(target: ByteArray, parts: Mapping[str, ByteArray], item: int) -> None:
    """Turns the old version of a tensor into the new one, in place.

    Args:
        target: the old version: uint8 [nbytes]. parts: from `encode_delta`. item: bytes per element.

    Raises:
        BadMessage: the parts do not fit this tensor; ``target`` is of no use then.
    """
    kinds = sorted(parts)
    if kinds == ["xor"]:
        flat = _unpacked(parts["xor"], len(target))
        if len(flat) != len(target):
            raise BadMessage(f"a change of {len(flat)} bytes for a tensor of {len(target)}")
        for part in _chunks(len(target)):
            target[part] ^= _elements(flat[part], item)
        return
    if kinds not in (["gaps32", "values"], ["gaps64", "values"]):
        raise BadMessage(f"a change made of {kinds or 'nothing'}: neither xor nor gaps and values")
    width = int(kinds[0].removeprefix("gaps")) // 8
    words = target.view(_WORDS[item])
    gaps = _elements(_unpacked(parts[kinds[0]], width * len(words)), width).view(f"<u{width}")
    values = _elements(_unpacked(parts["values"], len(target)), item).view(_WORDS[item])
    if len(gaps) != len(values):
        raise BadMessage(f"a change of {len(gaps)} positions and {len(values)} values")
    if len(gaps) == 0 or int(gaps.max()) > len(words):
        raise BadMessage("a change without elements, or beyond the tensor's end")
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if int(positions[-1]) >= len(words):
        raise BadMessage(f"a change of element {int(positions[-1])} of {len(words)}")
    words[positions] = values


def _chunks(size: int) -> list[slice]:
    return [slice(start, min(size, start + CHUNK_BYTES)) for start in range(0, size, CHUNK_BYTES)]


def _planes(data: ByteArray, item: int) -> ByteArray:
    """Orders the elements' first bytes before their second ones, and so on: planes of leading bytes are nearly all zeros."""
    return np.ascontiguousarray(data.reshape(-1, item).T).reshape(-1)


def _elements(planes: ByteArray, item: int) -> ByteArray:
    if len(planes) % item:
        raise BadMessage(f"{len(planes)} bytes of elements of {item}")
    return np.ascontiguousarray(planes.reshape(item, -1).T).reshape(-1)


def _packed(parts: list[ByteArray]) -> ByteArray:
    """Returns one zstd frame that says how much it holds."""
    compressor = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=sum(part.nbytes for part in parts))
    packed = b"".join([*(compressor.compress(part.data) for part in parts), compressor.flush()])
    return np.frombuffer(packed, dtype=np.uint8)


def _unpacked(packed: ByteArray, limit: int) -> ByteArray:
    """Returns the unpacked bytes. Raises BadMessage, also for a frame that claims more than ``limit`` bytes, before unpacking it."""
    data = np.ascontiguousarray(packed).data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= limit:
            raise BadMessage(f"a change of {size} bytes where at most {limit} fit")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise BadMessage(f"a change that cannot be unpacked: {error}") from error
