"""The layout of a push: each tensor's bucket and offset. Both ends of a push read the same manifest."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import xxhash

from shared.runtime.errors import BadMessage
from shared.runtime.safe_files import parse_json

# Every tensor begins at a multiple of so many bytes of its bucket: any dtype can be viewed there, and GPUs read whole lines
ALIGNMENT = 256

# bytes per element of the dtypes that a bucket may hold, by torch's names
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

RAMP_PART = 0.25  # the part of a full bucket that the smallest at the beginning and the end of a push have
Kind = Literal["weights", "adapter", "partial"]

MAX_DIMENSIONS = 32  # the most dimensions that a tensor may have
# the most characters of a tensor's name, all of which must be printable: a version's digest puts other characters between names
MAX_TENSOR_NAME = 1000
MAX_TENSOR_BYTES = 2**48  # the size from which on a tensor is refused for its shape alone


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a bucket.

    Args:
        name: as in a Hugging Face checkpoint; an adapter's as PEFT has them. dtype: torch's name for it. shape: row-major.
        offset: bytes from the bucket's beginning.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel as one flat array of bytes. The bytes between them have no meaning."""

    slots: tuple[Slot, ...]

    @cached_property
    def nbytes(self) -> int:
        last = self.slots[-1]
        return _aligned(last.offset + last.nbytes)


@dataclass(frozen=True)
class Manifest:
    """The buckets of one channel of a push, in the order in which they travel.

    Args:
        kind: ``weights``: tensors under their own names. ``adapter``: LoRA's matrices, to be laid over the base weights with ``scale``.
            ``partial``: what one rank of an engine holds of tensors, zeros in place of the rest; all ranks' together are whole.
    """

    buckets: tuple[Bucket, ...]
    kind: Kind = "weights"
    scale: float = 1.0

    def slots(self) -> Iterator[Slot]:
        for bucket in self.buckets:
            yield from bucket.slots

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @cached_property
    def encoded(self) -> bytes:
        """Returns JSON without the offsets, which follow from the rest."""
        buckets = [[[slot.name, slot.dtype, list(slot.shape)] for slot in bucket.slots] for bucket in self.buckets]
        return json.dumps({"kind": self.kind, "scale": self.scale, "buckets": buckets}, separators=(",", ":")).encode()

    @cached_property
    def id(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.encoded)

    @classmethod
    def decode(cls, encoded: bytes) -> "Manifest":
        """Reads the JSON of `encoded`. Raises BadMessage."""
        try:
            fields = parse_json(encoded)
            buckets = tuple(_bucket(checked_tensor(name, dtype, shape) for name, dtype, shape in slots) for slots in fields["buckets"])
            names = [slot.name for bucket in buckets for slot in bucket.slots]
            if len(set(names)) < len(names):
                raise ValueError("a tensor is in it twice")
            kind, scale = fields["kind"], float(fields["scale"])
            if kind not in get_args(Kind) or not math.isfinite(scale):
                raise ValueError(f"kind {kind!r} and scale {scale}")
            return cls(buckets, kind, scale)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise BadMessage(f"a manifest of weights that cannot be read: {type(error).__name__}: {error}") from error


Unit = TypeVar("Unit")
TensorSpec = tuple[str, str, tuple[int, ...]]  # A tensor's name, dtype and shape


def checked_tensor(name: Any, dtype: Any, shape: Any) -> TensorSpec:
    """Returns what was received as a tensor's name, dtype and shape. Raises ValueError, TypeError: no tensor can have them."""
    if not (isinstance(name, str) and 0 < len(name) <= MAX_TENSOR_NAME and name.isprintable()):
        raise ValueError(f"a tensor called {str(name)[:100]!r}")
    sizes = checked_sizes(shape)
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: dtype {str(dtype)[:100]!r}")
    if len(sizes) > MAX_DIMENSIONS or math.prod(sizes) * ITEM_BYTES[dtype] > MAX_TENSOR_BYTES:
        raise ValueError(f"{name}: a {dtype} of shape {sizes[:MAX_DIMENSIONS]!s}")
    return name, dtype, sizes


def checked_sizes(values: Any) -> tuple[int, ...]:
    """Returns integers from 0 up as a tuple. Raises ValueError, TypeError for anything else."""
    sizes = tuple(values)
    if not all([type(size) is int and 0 <= size < 2**63 for size in sizes]):
        raise ValueError(f"{str(sizes)[:100]} where sizes from 0 on belong")
    return sizes


def lay_out(tensors: Iterable[TensorSpec], bucket_bytes: int, kind: Kind = "weights", scale: float = 1.0) -> Manifest:
    """Returns a manifest with buckets of at most ``bucket_bytes``, unless a tensor alone is larger, in the order given."""
    return lay_out_units(loaded_together(tensors, lambda tensor: tensor[0]), bucket_bytes, kind, scale)


def loaded_together(units: Iterable[Unit], name: Callable[[Unit], str]) -> Iterator[list[Unit]]:
    """Yields groups of units that must share a bucket: SGLang makes one parameter of latent attention's two projections to low ranks, and
    silently drops one that comes without the other. ``name``: gives a unit's first tensor. Each group stands where its last unit stood."""
    halves = dict[str, list[Unit]]()
    for unit in units:
        group, whole = [unit], name(unit).replace(".q_a_proj.", ".kv_a_proj_with_mqa.")
        if ".kv_a_proj_with_mqa." in whole:
            if whole not in halves:
                halves[whole] = group
                continue
            group = [*halves.pop(whole), unit]
        yield group
    yield from halves.values()


def lay_out_units(
    units: Iterable[Sequence[TensorSpec]], bucket_bytes: int, kind: Kind = "weights", scale: float = 1.0, *, ramped: bool = False
) -> Manifest:
    """Returns the manifest as `lay_out` does; the tensors of a unit share a bucket.

    Args:
        ramped: the first buckets and the last are smaller, down to `RAMP_PART` of the others: nothing travels while the first is filled,
            nor while the last is loaded.
    """
    sizes = [(unit, unit_bytes(unit)) for unit in units]
    left = sum(nbytes for _, nbytes in sizes)
    buckets: list[Bucket] = []
    held: list[TensorSpec] = []
    size, least = 0, int(bucket_bytes * RAMP_PART)
    rise, limit = least, bucket_bytes
    for unit, nbytes in sizes:
        if held and size + nbytes > limit:
            buckets.append(_bucket(held))
            held, size, rise = [], 0, rise * 2
        if not held and ramped:
            limit = min(bucket_bytes, max(least, min(rise, left // 2)))
        held += unit
        size += nbytes
        left -= nbytes
    if held:
        buckets.append(_bucket(held))
    return Manifest(tuple(buckets), kind, scale)


def unit_bytes(unit: Iterable[TensorSpec]) -> int:
    """Returns the bytes that tensors take in a bucket."""
    return sum(_aligned(math.prod(shape) * ITEM_BYTES[dtype]) for _, dtype, shape in unit)


def _bucket(tensors: Iterable[TensorSpec]) -> Bucket:
    slots, offset = [], 0
    for name, dtype, shape in tensors:
        slots.append(Slot(name, dtype, shape, offset))
        offset = _aligned(offset + slots[-1].nbytes)
    if not slots:
        raise ValueError("a bucket without tensors")
    return Bucket(tuple(slots))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
