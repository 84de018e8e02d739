"""Versions of the weights in an object store: immutable chunks called after their BLAKE3, and an index of the versions made of them.

The trainer publishes what lies in its directory of snapshots (`ObjectPublisher`); its announcement on the bus names the newest index, so a
replica believes the trainer's account and nothing that the store says. A replica takes the cheapest way from the version that it holds:
deltas, or the newest whole checkpoint and the deltas on that (`ObjectIndex.chain`). Replicas that name one directory download each
checkpoint once between them (`ObjectMirror`): whoever holds its lock downloads, the others wait and read.
"""

import contextlib
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.runtime.safe_files import is_plain_name, locked, open_regular, publish
from shared.store.s3 import ObjectCorrupt, ObjectGone, S3Client, download
from shared.transfer.weight_checkpoint import (
    CHECKPOINT_FILE,
    BrokenCheckpoint,
    VersionId,
    WeightCheckpoint,
    directory_name,
    load_checkpoint,
)

OBJECT_NAME = re.compile(r"[0-9a-f]{64}\Z")
_KEPT_NAME = re.compile(r"\.?(v(\d{6,15}))(?:\.[0-9a-f]{16}\.partial)?\Z")  # of a mirror's checkpoint, or its draft
# Bytes of a chunk: a far connection carries so little that even a delta has to be spread over many; a large model has to have few objects.
LEAST_OBJECT, LARGEST_OBJECT = 1 << 20, 1 << 26
MAX_INDEX = 256 * 1024**2  # bytes of an index, which has about 70 for each chunk


def object_bytes(size: int) -> int:
    """Returns the bytes of each chunk, but the last, of a file of ``size`` bytes: 128 to 256 of them where the bounds allow it."""
    return min(max(LEAST_OBJECT, 1 << (size >> 8).bit_length()), LARGEST_OBJECT)


class StoredFile(NamedTuple):
    """A file's size, and the names of its chunks in their order."""

    bytes: int
    chunks: list[str]


class StoredCheckpoint(BaseModel):
    """A whole checkpoint, or with a ``base`` a delta on it. ``files``: all of its directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(ge=0)
    digest: str
    base: VersionId | None
    files: dict[str, StoredFile]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def place(self) -> str:
        """Returns its directory, relative to a mirror's."""
        return f"{'full' if self.base is None else 'delta'}/{directory_name(self.version)}"


class ObjectIndex(BaseModel):
    """The checkpoints that the store holds. A version may be there twice: whole, and as a delta on the one before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoints: list[StoredCheckpoint]

    @property
    def objects(self) -> set[str]:
        return {name for found in self.checkpoints for file in found.files.values() for name in file.chunks}

    def chain(self, wanted: VersionId, held: VersionId | None) -> list[StoredCheckpoint] | None:
        """Returns the checkpoints with the fewest bytes that make ``wanted``, on ``held`` or from a whole one; None if there are none."""
        best: dict[VersionId, tuple[int, list[StoredCheckpoint]]] = {} if held is None else {held: (0, [])}
        for found in sorted(self.checkpoints, key=lambda found: found.version):
            own = VersionId(found.version, found.digest)
            before = (0, []) if found.base is None else best.get(found.base)
            if before is not None and (own not in best or before[0] + found.bytes < best[own][0]):
                best[own] = before[0] + found.bytes, [*before[1], found]
        return best[wanted][1] if wanted in best else None

    @classmethod
    def read(cls, data: bytes) -> "ObjectIndex":
        """Raises ValueError for what is no index, or names what is no plain file or object."""
        try:
            index = cls.model_validate_json(data)
        except ValidationError as error:
            raise ValueError(f"no index: {error.errors(include_url=False, include_input=False)[0]['msg']}") from None
        for name, file in (item for found in index.checkpoints for item in found.files.items()):
            count = -(-file.bytes // object_bytes(file.bytes))
            if not is_plain_name(name) or not all(map(OBJECT_NAME.match, file.chunks)) or len(file.chunks) != count:
                raise ValueError(f"a file {name!r} of {file.bytes} bytes in {len(file.chunks)} chunks")
        return index


class PublishedIndex(NamedTuple):
    """What a publication came to. ``name`` and ``bytes``: of the index. ``sent``: bytes uploaded for it."""

    name: str
    bytes: int
    sent: int


class ObjectPublisher:
    """Uploads checkpoints and removes what no index that is still read names. It is the only writer below its client's prefix.

    Args:
        connections: uploads at a time. deadline: seconds for each object.
    """

    def __init__(self, client: S3Client, connections: int, deadline: float) -> None:
        self.client, self._connections, self._deadline = client, connections, deadline
        self._present: set[str] | None = None  # the objects in the store
        self._described: dict[tuple[Path, VersionId, float], StoredCheckpoint] = {}  # by path, version and time of writing
        self.indices: dict[str, set[str]] = {}  # index → the objects that it names, itself among them; the newest is the last

    def publish(self, checkpoints: Sequence[WeightCheckpoint], *, again: bool = False) -> PublishedIndex:
        """Uploads what the store lacks of these checkpoints, then their index. ``again``: uploads what is there, too, since it is damaged.

        Raises OSError for a file that cannot be read, and as `S3Client.put` does.
        """
        if self._present is None:
            self._present = {key for key in self.client.listed() if OBJECT_NAME.match(key)}
        present, sent, lock = self._present, 0, threading.Lock()
        described: dict[tuple[Path, VersionId, float], StoredCheckpoint] = {}
        for checkpoint in checkpoints:
            key = (checkpoint.path, checkpoint.id, checkpoint.at)
            described[key] = self._described.get(key) or _described(checkpoint)
        self._described = described
        index = ObjectIndex(checkpoints=list(described.values()))
        content = index.model_dump_json().encode()

        def upload(item: tuple[str, bytes | tuple[Path, int]]) -> None:
            nonlocal sent
            name, source = item
            data = source if isinstance(source, bytes) else _chunk(*source)
            self.client.put(name, data, self._deadline)
            with lock:
                present.add(name)
                sent += len(data)

        missing: dict[str, tuple[Path, int]] = {}
        for (path, *_), found in described.items():
            for file, stored in found.files.items():
                missing.update({name: (path / file, at) for at, name in enumerate(stored.chunks) if again or name not in present})
        with ThreadPoolExecutor(self._connections, thread_name_prefix="objects") as threads:
            list(threads.map(upload, missing.items()))
        name = blake3(content).hexdigest()
        if again or name not in present:
            upload((name, content))
        self.indices[name] = {name, *index.objects}
        return PublishedIndex(name, len(content), sent)

    def collect(self, read: set[str]) -> int:
        """Removes the objects that neither the newest index names nor one in ``read``, which replicas still follow. Returns how many."""
        newest = next(reversed(self.indices), None)
        self.indices = {name: objects for name, objects in self.indices.items() if name in read or name == newest}
        needed = set[str]().union(*self.indices.values())
        unneeded = [] if self._present is None or newest is None else sorted(self._present - needed)
        for name in unneeded:
            self.client.remove(name)
            self._present.discard(name)  # type: ignore[union-attr]
        return len(unneeded)


def _described(checkpoint: WeightCheckpoint) -> StoredCheckpoint:
    files = {}
    for name in [*checkpoint.files, CHECKPOINT_FILE]:
        size = (checkpoint.path / name).stat().st_size
        count = -(-size // object_bytes(size))
        files[name] = StoredFile(size, [_name(_chunk(checkpoint.path / name, at)) for at in range(count)])
    return StoredCheckpoint(version=checkpoint.version, digest=checkpoint.digest, base=checkpoint.base, files=files)


def _name(data: bytes) -> str:
    return blake3(data, max_threads=blake3.AUTO).hexdigest()


def _chunk(path: Path, at: int) -> bytes:
    with open_regular(path) as file:
        length = object_bytes(os.fstat(file.fileno()).st_size)
        file.seek(at * length)
        return file.read(length)


class ObjectMirror:
    """A site's copy of the checkpoints that its replicas take from the store.

    Args:
        directory: of one run; several replicas may share it. sign: returns a pre-signed URL of an object (index, object), on any thread.
        connections: downloads at a time. deadline: seconds for each object.
    """

    def __init__(self, directory: Path, sign: Callable[[str, str], str], connections: int, deadline: float) -> None:
        self._directory, self._sign, self._connections, self._deadline = directory, sign, connections, deadline
        self._used = contextlib.ExitStack()  # shared locks of what the last pull returned: no other replica removes it
        self.received = 0  # bytes downloaded by this process

    def pull(self, index: str, index_bytes: int, wanted: VersionId, held: VersionId | None) -> list[WeightCheckpoint]:
        """Returns the checkpoints that make ``wanted`` on ``held``, once all of them lie here. They stay at least until the next pull.

        Raises BrokenCheckpoint for what the store lacks, or has under a wrong name; DeadlineExceeded, ObjectStoreRefused, OSError.
        """
        if not OBJECT_NAME.match(index) or not 0 < index_bytes <= MAX_INDEX:
            raise BrokenCheckpoint(wanted.version, self._directory, f"its index is announced as {index!r} of {index_bytes} bytes")
        try:
            found = ObjectIndex.read(self._object(index, index, index_bytes))
        except (ObjectGone, ObjectCorrupt, ValueError) as error:
            raise BrokenCheckpoint(wanted.version, self._directory, str(error)) from error
        chain = found.chain(wanted, held)
        if chain is None:
            raise BrokenCheckpoint(wanted.version, self._directory, "its index has no whole checkpoint below it")
        self._used.close()
        paths = [self._fetched(index, part) for part in chain]
        self._retain(found)
        return [load_checkpoint(path) for path in paths]

    def discard(self, path: Path) -> None:
        """Removes a checkpoint that turned out to be damaged here."""
        if path.parent.parent == self._directory:
            shutil.rmtree(path, ignore_errors=True)

    def _object(self, index: str, name: str, size: int) -> bytes:
        data = download(lambda: self._sign(index, name), size, name, self._deadline)
        self.received += size
        return data

    def _fetched(self, index: str, part: StoredCheckpoint) -> Path:
        path = self._directory / part.place
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock"), 10 * self._deadline, "a checkpoint of this site"):
            fcntl.flock(self._used.enter_context(path.with_name(f".{path.name}.used").open("a+b")), fcntl.LOCK_SH)
            if _is_there(path, part):
                return path
            draft = path.with_name(f".{path.name}.{part.digest[:16]}.partial")
            draft.mkdir(exist_ok=True)
            for name in {*os.listdir(draft)} - part.files.keys():
                (draft / name).unlink()
            try:
                with ThreadPoolExecutor(self._connections, thread_name_prefix="objects") as threads:
                    list(threads.map(lambda item: self._fetch(index, draft, *item), _chunks(part)))
            except (ObjectGone, ObjectCorrupt) as error:
                raise BrokenCheckpoint(part.version, path, str(error)) from error
            shutil.rmtree(path, ignore_errors=True)  # another history's version of this number
            publish(draft, path)
        return path

    def _fetch(self, index: str, draft: Path, file: str, size: int, at: int, name: str) -> None:
        """Writes a chunk to its place in a file, unless it lies there already: an earlier attempt may have been interrupted."""
        start, path = at * object_bytes(size), draft / file
        length = min(object_bytes(size), size - start)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as target:
            there = os.fstat(target.fileno()).st_size > start and _name(os.pread(target.fileno(), length, start)) == name
            if length and not there:
                os.pwrite(target.fileno(), self._object(index, name, length), start)

    def _retain(self, index: ObjectIndex) -> None:
        """Removes older versions, and drafts of them, that the store no longer has and no replica here uses or downloads."""
        listed, newest = {found.place for found in index.checkpoints}, max((found.version for found in index.checkpoints), default=0)
        for path in [path for kind in ("full", "delta") for path in (self._directory / kind).glob("*")]:
            found = _KEPT_NAME.match(path.name)
            if found is None or int(found[2]) >= newest or f"{path.parent.name}/{found[1]}" in listed:
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as locks:
                for lock in (path.with_name(f".{found[1]}.lock"), used := path.with_name(f".{found[1]}.used")):
                    fcntl.flock(locks.enter_context(lock.open("a+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                used.unlink()  # the other one stays: a process that waits for it would lock a file that no other finds


def _chunks(part: StoredCheckpoint) -> Iterator[tuple[str, int, int, str]]:
    """Yields file, its size, index and name of each chunk; an empty file has one without content."""
    for name, file in part.files.items():
        for at, chunk in enumerate(file.chunks or [""]):
            yield name, file.bytes, at, chunk


def _is_there(path: Path, part: StoredCheckpoint) -> bool:
    with contextlib.suppress(BrokenCheckpoint):
        found = load_checkpoint(path)
        found.check_files(contents=False)
        return (found.version, found.digest, found.base) == (part.version, part.digest, part.base)
    return False
