"""Versions of the weights on disk: whole Hugging Face checkpoints, deltas on them, and a local copy that deltas are applied to.

Each version is a directory ``v000012`` with a small ``checkpoint.json``. It appears complete or not at all
(`shared.runtime.safe_files`) and is never changed afterwards. The chain of a version is the newest whole checkpoint at or below it and
the deltas from there on, each lying on the one before.

A local checkpoint is a replica's cache, or what the trainer wrote last. Its tensors are changed in place through memory maps, so a model
is never in memory as a whole. While it is changed it has a scratch name: a process that is killed there leaves nothing that could be
taken for a version.

A delta stores bits, never arithmetic. ``xor`` stores the exclusive or of old and new, the elements' first bytes before all their second
ones: after a small step the leading ones are zeros. ``overwrite`` stores positions (as distances) and values of the elements that differ;
it is shorter where few do. ``magnitude`` stores distances among the elements of one magnitude, which the older version tells, and by how
many representable values each moves: less than half of ``xor`` for bfloat16 after a small step. ``auto`` is ``magnitude`` for elements of
one or two bytes, else ``xor``. Everything is compressed with zstd.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.config.run_config import RunConfig
from shared.runtime.errors import BadMessage, MyxoError
from shared.runtime.safe_files import is_plain_name, open_regular, parse_json, read_regular, replaced_by, scratch, settle
from shared.transfer import digest
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.manifest import ITEM_BYTES, Manifest, checked_tensor, lay_out
from shared.transfer.tensor_file import HASH_THREADS, ByteArray, TensorFileBroken, TensorFiles

DeltaEncoding = Literal["auto", "xor", "overwrite", "magnitude"]
DeltaParts = dict[str, ByteArray]  # A tensor's change: ``xor`` alone, ``gaps`` and ``values``, or `_MAGNITUDE`; each compressed
_MAGNITUDE = ["far", "near", "steps"]
BLOCK = 1 << 16  # elements that are ordered at once: they stay in a core's cache
_FAR = 255  # a gap as long as this or longer has a word of its own
LEVEL = 1  # the level of zstd; level 3 saves less than 1 % of such bytes
# The bytes processed at once, so that a large tensor does not need several times its memory. It is part of the format of ``xor``.
CHUNK_BYTES = 64 * 1024**2
Words: TypeAlias = NDArray[np.unsignedinteger[Any]]
_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode_delta(old: ByteArray, new: ByteArray, item: int, encoding: DeltaEncoding) -> DeltaParts:
    """Returns the change from ``old`` to ``new``, empty if there is none.

    Args:
        old, new: uint8 [nbytes], contiguous. item: bytes per element: 1, 2, 4 or 8.
    """
    if np.array_equal(old, new):
        return {}
    if encoding == "auto":
        encoding = "magnitude" if item <= 2 else "xor"
    if encoding == "xor":
        return {"xor": _packed([_planes(old[part] ^ new[part], item) for part in _chunks(len(old))])}
    before, after = old.view(_WORDS[item]), new.view(_WORDS[item])
    if encoding == "magnitude":
        return _by_magnitude(before, after, item)
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
    if kinds == _MAGNITUDE:
        return _apply_by_magnitude(target.view(_WORDS[item]), parts, item)
    if kinds not in (["gaps32", "values"], ["gaps64", "values"]):
        raise BadMessage(f"a change made of {kinds or 'nothing'}: neither xor, nor gaps and values, nor near, far and steps")
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


def _by_magnitude(before: Words, after: Words, item: int) -> DeltaParts:
    """Returns the change as distances and steps, in an order of the elements that both sides know: chunk by chunk by `_magnitudes`.

    Adam moves all elements by about the same amount, so how likely one is to reach a neighbouring value depends on its magnitude alone:
    within one the distances are those of independent events, which zstd's entropy stage packs to within some percent of the least.
    """
    ranks, steps = [np.empty(0, np.int64)], [np.empty(0, before.dtype)]
    for start in range(0, len(before), CHUNK_BYTES // item):
        old, new = (words[start : start + CHUNK_BYTES // item] for words in (before, after))
        firsts, kinds, found, moved = _firsts(old, item) + start, [], [], []
        for begin in range(0, len(old), BLOCK):
            here, there = old[begin : begin + BLOCK], new[begin : begin + BLOCK]
            magnitudes, order, own = _ordered(here, item)
            places = np.flatnonzero((here != there)[order])
            elements = order[places]
            kinds.append(magnitudes[elements])
            found.append(places + (firsts - own)[kinds[-1]])
            moved.append(there[elements] - here[elements])
            firsts += np.diff(own, append=len(here))
        by_kind = np.argsort(np.concatenate(kinds), kind="stable")
        ranks.append(np.concatenate(found)[by_kind])
        steps.append(np.concatenate(moved)[by_kind])
    gaps = np.diff(np.concatenate(ranks), prepend=-1) - 1
    far, step = gaps[gaps >= _FAR] - _FAR, np.concatenate(steps)
    folded = np.where(step >> (8 * item - 1), ~(step << 1), step << 1).astype(step.dtype)  # small steps down are small numbers, too
    return {
        "near": _packed([np.minimum(gaps, _FAR).astype(np.uint8)]),
        "far": _packed([_planes(far.astype("<u8").view(np.uint8), 8)]),
        "steps": _packed([_planes(folded.view(np.uint8), item)]),
    }


def _apply_by_magnitude(words: Words, parts: Mapping[str, ByteArray], item: int) -> None:
    near = _unpacked(parts["near"], len(words))
    far = _elements(_unpacked(parts["far"], 8 * len(words)), 8).view("<u8")
    folded = _elements(_unpacked(parts["steps"], item * len(words)), item).view(words.dtype)
    long = np.flatnonzero(near == _FAR)
    if not len(near) == len(folded) > 0 or len(long) != len(far) or (len(far) and int(far.max()) >= len(words)):
        raise BadMessage(f"a change of {len(near)} distances, {len(far)} of {len(long)} long ones, and {len(folded)} steps")
    gaps = near.astype(np.int64)
    gaps[long] += far.astype(np.int64)
    ranks = np.cumsum(gaps + 1) - 1
    if int(ranks[-1]) >= len(words):
        raise BadMessage(f"a change of element {int(ranks[-1])} of {len(words)}")
    steps = np.where(folded & 1, ~(folded >> 1), folded >> 1).astype(words.dtype)
    for start in range(0, len(words), CHUNK_BYTES // item):
        old = words[start : start + CHUNK_BYTES // item]
        firsts = _firsts(old, item) + start
        for begin in range(0, len(old), BLOCK):
            here = old[begin : begin + BLOCK]
            _, order, own = _ordered(here, item)
            counts = np.diff(own, append=len(here))
            lows, highs = np.searchsorted(ranks, firsts), np.searchsorted(ranks, firsts + counts)
            for kind in np.flatnonzero(highs > lows):
                these = slice(lows[kind], highs[kind])
                here[order[ranks[these] - firsts[kind] + own[kind]]] += steps[these]
            firsts += counts


def _ordered(words: Words, item: int) -> tuple[ByteArray, NDArray[np.int64], NDArray[np.int64]]:
    """Returns the magnitudes of a block's elements, the elements ordered by them, and where each of 256 begins in this order. A magnitude
    is the eight bits after the sign: of bfloat16 and float32 the exponent."""
    magnitudes = ((words << 1) >> (8 * item - 8)).astype(np.uint8)
    counts = np.bincount(magnitudes, minlength=256)
    return magnitudes, np.argsort(magnitudes, kind="stable"), np.cumsum(counts) - counts


def _firsts(words: Words, item: int) -> NDArray[np.int64]:
    """Returns where each magnitude begins in a chunk's order."""
    counts = np.zeros(256, np.int64)
    for begin in range(0, len(words), BLOCK):
        counts += np.bincount(((words[begin : begin + BLOCK] << 1) >> (8 * item - 8)).astype(np.uint8), minlength=256)
    return np.cumsum(counts) - counts


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


CHECKPOINT_FILE = "checkpoint.json"
MAX_CHECKPOINT_JSON = 64 * 1024**2  # The most bytes of a ``checkpoint.json``, which has about 150 for each tensor
_DIRECTORY_NAME = re.compile(r"v([0-9]{6,15})\Z")


class BrokenCheckpoint(MyxoError):
    """A version on disk cannot be used because a checkpoint of its chain, ``version``, is missing, torn or altered."""

    def __init__(self, version: int, path: Path, reason: str) -> None:
        self.version, self.path, self.reason = version, path, reason
        super().__init__(f"version {version} cannot be had from {path}: {reason}")


class FileSum(NamedTuple):
    """The size of a file and its xxh3 of 128 bits, in hexadecimal digits."""

    bytes: int
    xxh3: str

    @classmethod
    def read(cls, path: Path) -> "FileSum":
        with open_regular(path) as file:
            return cls(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, xxhash.xxh3_128).hexdigest())


class VersionId(NamedTuple):
    """A version's number and its digest."""

    version: int
    digest: str


class WeightCheckpoint(BaseModel):
    """A version on disk, as its ``checkpoint.json`` describes it.

    Args:
        path: its directory. digest: the version's. tensors: all tensors of the version. files: every file but ``checkpoint.json``.
        base: the version whose changes the files hold; None: they hold all of it. at: seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path = Field(exclude=True)
    format: Literal[3] = 3
    version: int
    digest: str
    tensors: dict[str, TensorDigest]
    files: dict[str, FileSum]
    base: VersionId | None = None
    at: float = 0.0

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for name in self.files:
            if not is_plain_name(name) or name == CHECKPOINT_FILE:
                raise ValueError(f"a file called {name!r}")
        for name, tensor in self.tensors.items():
            checked_tensor(name, tensor.dtype, tensor.shape)
        if version_digest(self.tensors) != self.digest:
            raise ValueError("its digest is not that of its tensors")
        if self.base is not None and self.base.version >= self.version:
            raise ValueError(f"it lies on version {self.base.version}")
        return self

    @property
    def kind(self) -> Literal["full", "delta"]:
        return "full" if self.base is None else "delta"

    @property
    def id(self) -> VersionId:
        return VersionId(self.version, self.digest)

    @property
    def bytes(self) -> int:
        """Returns the size of all files together, in bytes."""
        return sum(file.bytes for file in self.files.values())

    def manifest(self, bucket_bytes: int) -> Manifest:
        """Returns its tensors in the order in which an engine is asked to take them, and is sent them."""
        return lay_out([(name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()], bucket_bytes)

    def tensor_files(self) -> list[Path]:
        return [self.path / name for name in sorted(self.files) if name.endswith(".safetensors")]

    def save(self) -> None:
        """Writes ``checkpoint.json`` into the checkpoint's directory."""
        (self.path / CHECKPOINT_FILE).write_text(self.model_dump_json() + "\n")

    def broken(self, reason: object) -> BrokenCheckpoint:
        """Returns the error to raise for a checkpoint that cannot be used."""
        return BrokenCheckpoint(self.version, self.path, str(reason))

    def check_files(self, *, contents: bool = True) -> None:
        """Compares the size of every file, and its bytes if ``contents``. Raises BrokenCheckpoint that names the first that differs.

        A file that ``checkpoint.json`` does not name makes it broken, too: an engine loads whatever weights lie in the directory.
        """
        try:
            unknown = {*os.listdir(self.path)} - self.files.keys() - {CHECKPOINT_FILE}
        except OSError as error:
            raise self.broken(error.strerror) from error
        if unknown:
            raise self.broken(f"it holds {min(unknown)!r}, which its {CHECKPOINT_FILE} does not name")
        for name, expected in self.files.items():
            try:
                size = os.lstat(self.path / name).st_size
                if size != expected.bytes:
                    raise self.broken(f"{name} is {size} bytes, not {expected.bytes}")
                if contents and FileSum.read(self.path / name) != expected:
                    raise self.broken(f"{name} is altered: its xxh3 is not the one that it was written with")
            except OSError as error:
                raise self.broken(f"{name}: {error.strerror}") from error


def load_checkpoint(path: Path) -> WeightCheckpoint:
    """Reads the ``checkpoint.json`` of a directory, and none of its other files.

    Raises:
        BrokenCheckpoint: the directory is missing, or contradicts itself.
    """
    version = version_of(path)
    if version is None:
        raise BrokenCheckpoint(-1, path, "no directory of a version: those are called v000012")
    try:
        fields: dict[str, Any] = parse_json(read_regular(path / CHECKPOINT_FILE, MAX_CHECKPOINT_JSON))
        if fields["version"] != version:
            raise ValueError(f"it says that it is version {fields['version']!r}")
        return WeightCheckpoint.model_validate(fields | {"path": path})
    except FileNotFoundError:
        raise BrokenCheckpoint(version, path, f"it has no {CHECKPOINT_FILE}" if path.exists() else "it is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(version, path, f"its {CHECKPOINT_FILE} cannot be read: {type(error).__name__}: {error}") from error


def directory_name(version: int) -> str:
    """Returns the name of a version's directory."""
    return f"v{version:06d}"


def version_of(path: Path) -> int | None:
    """Returns the version that a directory is called after, or None if it is no version's."""
    match = _DIRECTORY_NAME.match(path.name)
    return int(match[1]) if match else None


class WeightCheckpoints:
    """The versions below one directory, which need not exist yet. Nothing is cached, because another process writes there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def of_run(cls, config: RunConfig) -> "WeightCheckpoints":
        """Returns a run's versions, which its trainer may remove. In a directory that runs share they lie in one by the run's name."""
        shared = config.weights.update_weight_disk_dir
        return cls(config.trained / "weights" if shared is None else shared / config.run.name)

    def path_of(self, version: int) -> Path:
        return self.directory / directory_name(version)

    def versions(self) -> list[int]:
        """Returns the versions that there are directories of, readable or not, the oldest first."""
        if not self.directory.is_dir():
            return []
        found = (version_of(path) for path in self.directory.iterdir() if path.is_dir() and not path.is_symlink())
        return sorted(version for version in found if version is not None)

    def load(self, version: int) -> WeightCheckpoint:
        """Reads the checkpoint of a version. Raises BrokenCheckpoint."""
        return load_checkpoint(self.path_of(version))

    def readable(self) -> list[WeightCheckpoint]:
        """Returns the checkpoints that can be read, the oldest first."""
        found = []
        for version in self.versions():
            with contextlib.suppress(BrokenCheckpoint):
                found.append(self.load(version))
        return found

    def newest(self) -> WeightCheckpoint | None:
        """Returns the newest checkpoint that can be read."""
        return next(reversed(self.readable()), None)

    def chain(self, version: int) -> list[WeightCheckpoint]:
        """Returns the checkpoints that make ``version``, the whole one first. Reads only their ``checkpoint.json``.

        Raises:
            BrokenCheckpoint: it names the checkpoint that is missing, torn, or not what the one above it lies on.
        """
        chain = [self.load(version)]
        while (wanted := chain[0].base) is not None:
            base = self.load(wanted.version)
            if base.id != wanted:
                raise base.broken(f"version {chain[0].version} lies on another version {base.version} ({wanted.digest}) than is here")
            chain.insert(0, base)
        return chain

    def remove_after(self, version: int) -> list[int]:
        """Removes and returns the versions above this one: a trainer that went back to a checkpoint makes them anew."""
        later = [found for found in self.versions() if found > version]
        for found in reversed(later):  # no delta ever lies on a version that is gone
            _remove(self.path_of(found))
        return later

    def retain(self, count: int) -> list[int]:
        """Removes what the newest ``count`` readable versions are not made of. Returns what it removed, the newest first.

        A directory that cannot be read stays, because whoever wrote it may want to know. While a checkpoint of a retained chain is missing,
        everything stays: what that chain was made of is not known.
        """
        readable = self.readable()
        try:
            needed = {part.version for newest in readable[-count:] for part in self.chain(newest.version)}
        except BrokenCheckpoint:
            return []
        removed = [found.version for found in reversed(readable) if found.version not in needed]
        for version in removed:
            _remove(self.path_of(version))
        return removed

    def remove_before(self, version: int) -> None:
        """Removes the versions below this one."""
        for found in [found for found in self.versions() if found < version]:
            _remove(self.path_of(found))

    def sweep(self) -> None:
        """Cleans up the changes in which an earlier writer was killed. Only the single writer calls it, when it starts."""
        for path in list(self.directory.iterdir()) if self.directory.is_dir() else []:
            if (target := replaced_by(path)) is not None and version_of(target) is not None:
                settle(target)
            elif path.name.startswith(".v") and path.name.endswith((".partial", ".removed")):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Takes a version's name away first, so that half of it is never seen."""
    renamed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(renamed, ignore_errors=True)
    path.rename(renamed)
    shutil.rmtree(renamed)


COPY_BYTES = 16 * 1024**2  # the bytes that are copied at a time


class LocalCheckpoint:
    """At most one version below ``directory``, which has no other writer.

    What an earlier process has left there counts once its bytes have been read and found right.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._held: WeightCheckpoint | None = None
        self._looked = False

    def held(self) -> WeightCheckpoint | None:
        """Returns the verified version that lies here, None if there is none or it is damaged. The first call may read all of it."""
        if not self._looked:
            self._looked, self._held = True, self._found()
        return self._held

    def clear(self) -> None:
        """Removes the version and everything else in the directory."""
        self._held, self._looked = None, True
        shutil.rmtree(self.directory, ignore_errors=True)

    def copy_from(self, checkpoint: WeightCheckpoint) -> None:
        """Becomes a copy of a whole checkpoint whose files have been checked."""
        self.clear()
        draft = scratch(self.directory / directory_name(checkpoint.version))
        for name in checkpoint.files:
            with open_regular(checkpoint.path / name) as source, (draft / name).open("xb") as copy:
                shutil.copyfileobj(source, copy, COPY_BYTES)
        self.finish_change(draft, checkpoint)

    def begin_change(self) -> tuple[Path, TensorFiles]:
        """Withdraws the version, to be changed into another. Returns its directory and its tensors, whose bytes may be changed."""
        held = self.held()
        assert held is not None  # callers have looked
        draft = held.path.with_name(f".{held.path.name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        held.path.rename(draft)
        self._held = None
        (draft / CHECKPOINT_FILE).unlink()
        return draft, _tensors(draft, writable=True)

    def finish_change(self, draft: Path, checkpoint: WeightCheckpoint) -> None:
        """Names ``draft``, which holds the tensors of ``checkpoint`` now, after its version.

        Sums of its files are not recorded, because they change with every version. It is not synced, because whoever finds it later reads
        all of it.
        """
        path = draft.with_name(directory_name(checkpoint.version))
        held = checkpoint.model_copy(update={"path": draft, "files": {}, "base": None})
        held.save()
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
        self._held, self._looked = held.model_copy(update={"path": path}), True

    def follow(self, source: WeightCheckpoints, version: int) -> WeightCheckpoint:
        """Returns ``version`` as `follow_chain` does. Raises BrokenCheckpoint, also for one of ``source`` that is missing."""
        return self.follow_chain(source.chain(version))

    def follow_chain(self, chain: list[WeightCheckpoint]) -> WeightCheckpoint:
        """Returns the last version of a chain that begins with a whole one, or on the version held here; every byte of it is verified. It
        is the chain's own checkpoint if that is a whole one alone, else the copy here.

        Raises:
            BrokenCheckpoint: it names the checkpoint of the chain that is torn or altered. OSError: the copy's disk refuses it.
        """
        if len(chain) == 1 and chain[0].base is None:
            _verify(chain[0])
            return chain[0]
        ids, held = [part.id for part in chain], self.held()
        if chain and (base := chain[0].base) is not None:
            if held is None or held.id != base:
                raise chain[0].broken(f"it lies on version {base.version}, which is not held here")
            ids, chain = [base, *ids], [held, *chain]
        elif held is None or held.id not in ids:
            _verify(chain[0])
            try:
                self.copy_from(chain[0])
            except FileNotFoundError as error:  # it is gone since it was verified; any other error is of the copy's disk
                raise chain[0].broken(error) from error
            held = chain[0]
        for delta in chain[ids.index(held.id) + 1 :]:
            self._apply(delta)
        assert self._held is not None  # by copy_from or _apply
        return self._held

    def _apply(self, delta: WeightCheckpoint) -> None:
        """Applies one delta. Raises BrokenCheckpoint, and then the copy is gone."""
        delta.check_files()
        assert self._held is not None  # by copy_from, or by the delta before
        before = self._held.tensors
        draft = None
        try:
            draft, tensors = self.begin_change()
            _change(tensors, before, delta)
        except (TensorFileBroken, BadMessage, FileNotFoundError) as error:
            self.clear()
            if draft is None and isinstance(error, OSError):  # the copy itself is gone
                raise
            raise delta.broken(error) from error
        except BrokenCheckpoint:
            self.clear()
            raise
        self.finish_change(draft, delta)

    def _found(self) -> WeightCheckpoint | None:
        if not self.directory.is_dir():
            return None
        for path in sorted(self.directory.iterdir(), reverse=True):
            if version_of(path) is None:
                shutil.rmtree(path, ignore_errors=True)  # a version that was being made
                continue
            with contextlib.suppress(BrokenCheckpoint, TensorFileBroken):
                held = load_checkpoint(path)
                if version_digest(_tensors(path).digests()) == held.digest:
                    return held
        return None


def _tensors(directory: Path, *, writable: bool = False) -> TensorFiles:
    return TensorFiles(sorted(directory.glob("*.safetensors")), writable=writable)


def _change(held: TensorFiles, before: dict[str, TensorDigest], delta: WeightCheckpoint) -> None:
    """Turns the held tensors into the delta's, and checks each that changes."""
    changes = TensorFiles(delta.tensor_files())
    parts: dict[str, dict[str, ByteArray]] = {}
    for entry in changes.tensors:
        part, _, name = entry.partition("/")
        parts.setdefault(name, {})[part] = changes[entry]
    if foreign := parts.keys() - delta.tensors.keys():
        raise delta.broken(f"a change of {min(foreign)}, which is no tensor of the version")
    for name in before.keys() | delta.tensors.keys():
        if name not in parts and before.get(name) != delta.tensors.get(name):
            raise delta.broken(f"it has no change of {name}, which is not what it was in the version before")

    def change(name: str) -> None:
        expected = delta.tensors[name]
        if held.tensors.get(name) != (expected.dtype, expected.shape):
            raise delta.broken(f"{name} is of another dtype or shape than in the version before")
        apply_delta(held[name], parts[name], ITEM_BYTES[expected.dtype])
        if digest.of_bytes(held[name]) != expected.digest:
            raise delta.broken(f"{name} laid over its base is not what it should be (its digest differs)")

    with ThreadPoolExecutor(HASH_THREADS) as threads:
        list(threads.map(change, parts))


def _verify(checkpoint: WeightCheckpoint) -> None:
    """Reads all of a whole checkpoint. Raises BrokenCheckpoint."""
    checkpoint.check_files()
    try:
        found = TensorFiles(checkpoint.tensor_files()).digests()
    except (TensorFileBroken, OSError) as error:
        raise checkpoint.broken(error) from error
    if found != checkpoint.tensors:
        raise checkpoint.broken(f"its tensors are not those that its {CHECKPOINT_FILE} names")
