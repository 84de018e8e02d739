"""Versions of the weights on disk: whole Hugging Face checkpoints, and deltas that hold what changed since the version before.

Each version is a directory ``v000012`` with a small ``checkpoint.json``. It appears complete or not at all
(`shared.runtime.safe_files`) and is never changed afterwards. The chain of a version is the newest whole checkpoint at or below it
and the deltas from there on, each lying on the one before.
"""

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.config.run_config import RunConfig
from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import is_plain_name, open_regular, parse_json, read_regular, replaced_by, settle
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.manifest import checked_tensor

CHECKPOINT_FILE = "checkpoint.json"

MAX_CHECKPOINT_JSON = 64 * 1024**2
"""The most bytes of a ``checkpoint.json``, which has about 150 for each tensor."""

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
        everything stays: nobody can tell what that chain was made of.
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

    def sweep(self) -> None:
        """Cleans up the changes in which an earlier writer was killed. Only the single writer calls it, when it starts."""
        for path in list(self.directory.iterdir()) if self.directory.is_dir() else []:
            if (target := replaced_by(path)) is not None and version_of(target) is not None:
                settle(target)
            elif path.name.startswith(".v") and path.name.endswith((".partial", ".removed")):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Takes a version's name away first, so that nobody ever sees half of it."""
    renamed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(renamed, ignore_errors=True)
    path.rename(renamed)
    shutil.rmtree(renamed)
