"""What changed of a tensor between two versions, compressed, and how it is laid over the older one. Bits, never arithmetic.

``xor``: old and new by exclusive or, the elements' first bytes before all their second ones: after a small step the leading ones
are zeros. ``overwrite``: positions and values of the elements that differ, positions as distances; shorter where few do.
Everything is compressed with zstd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from shared.runtime.errors import BadMessage

Bytes = NDArray[np.uint8]
Encoding = Literal["xor", "overwrite"]
Parts = dict[str, Bytes]
"""A tensor's change: ``xor`` alone, or ``gaps`` and ``values``; each compressed."""

LEVEL = 1
"""Of zstd. Level 3 saves less than 1 % of such bytes."""

CHUNK_BYTES = 64 * 1024**2
"""What is worked on at once: a tensor of gigabytes must not need several times its size in memory. Part of the format of ``xor``."""

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode(old: Bytes, new: Bytes, item: int, encoding: Encoding) -> Parts:
    """The change from ``old`` to ``new``; empty where there is none.

    Args:
        old, new: uint8 [nbytes], contiguous. item: bytes per element: 1, 2, 4 or 8.
    """
    if np.array_equal(old, new):
        return {}
    if encoding == "xor":
        return {"xor": _packed([_planes(old[part] ^ new[part], item) for part in _chunks(len(old))])}
    before, after = old.view(_WORDS[item]), new.view(_WORDS[item])
    step = CHUNK_BYTES // item
    places = [np.flatnonzero(before[start : start + step] != after[start : start + step]) + start for start in range(0, len(after), step)]
    positions = np.concatenate(places)
    gaps = np.diff(positions, prepend=-1) - 1
    wide = 4 if gaps.max() < 2**32 else 8
    as_bytes = gaps.astype(f"<u{wide}").view(np.uint8)
    return {f"gaps{8 * wide}": _packed([_planes(as_bytes, wide)]), "values": _packed([_planes(after[positions].view(np.uint8), item)])}


def apply(target: Bytes, parts: Mapping[str, Bytes], item: int) -> None:
    """Makes the new version of a tensor out of the old one, in place.

    Args:
        target: uint8 [nbytes], of the old version. parts: of `encode`.

    Raises BadMessage: they do not fit this tensor; ``target`` is of no use then.
    """
    kinds = set(parts)
    if kinds == {"xor"}:
        flat = _unpacked(parts["xor"], len(target))
        if len(flat) != len(target):
            raise BadMessage(f"a change of {len(flat)} bytes for a tensor of {len(target)}")
        for part in _chunks(len(target)):
            target[part] ^= _elements(flat[part], item)
        return
    wide = {frozenset({"gaps32", "values"}): 4, frozenset({"gaps64", "values"}): 8}.get(frozenset(kinds))
    if wide is None:
        raise BadMessage(f"a change made of {sorted(kinds) or 'nothing'}: neither xor nor gaps and values")
    words = target.view(_WORDS[item])
    gaps = _elements(_unpacked(parts[f"gaps{8 * wide}"], wide * len(words)), wide).view(f"<u{wide}")
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


def _planes(data: Bytes, item: int) -> Bytes:
    """The elements' first bytes, then their second ones, and so on. A plane of leading bytes is nearly all zeros, and packs well."""
    return np.ascontiguousarray(data.reshape(-1, item).T).reshape(-1)


def _elements(planes: Bytes, item: int) -> Bytes:
    if len(planes) % item:
        raise BadMessage(f"{len(planes)} bytes of elements of {item}")
    return np.ascontiguousarray(planes.reshape(item, -1).T).reshape(-1)


def _packed(parts: list[Bytes]) -> Bytes:
    """One zstd frame that says how much it holds."""
    compressor = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=sum(part.nbytes for part in parts))
    packed = b"".join([*(compressor.compress(part.data) for part in parts), compressor.flush()])
    return np.frombuffer(packed, dtype=np.uint8)


def _unpacked(packed: Bytes, limit: int) -> Bytes:
    """Raises BadMessage, also for a frame that claims more than ``limit`` bytes: nothing is unpacked then."""
    data = np.ascontiguousarray(packed).data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= limit:
            raise BadMessage(f"a change of {size} bytes where at most {limit} fit")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise BadMessage(f"a change that cannot be unpacked: {error}") from error
