"""Parts of a checkpoint as `JointWrite` has them written: each rank's shards, and in each directory the index, digests and the marker.

``digests.json`` has the size and digest of each file, and is written beside the marker, before the directory appears under its name. A
checkpoint without one (of an earlier version, or converted) counts as sound.

The pickles of a checkpoint run no code, wherever the directory came from. PyTorch unpickles ``.metadata``, and would unpickle the entries
that are no tensors (random states, say). The former is read here first, by an unpickler that knows the dozen names which such a file has;
for the latter `torch.load` is held to ``weights_only``.
"""

import contextlib
import enum
import json
import os
import pickle
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import torch

from services.trainer.parallel.staged_shards import StagedShards
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.safe_files import fsync_tree, is_plain_name, open_regular, parse_json, read_regular
from shared.transfer.weight_checkpoint import FileSum

DIGESTS = "digests.json"
_MOST_BYTES = 16 * 1024**2
SHARD = re.compile(r"__(\d+)_\d+\.distcp")


class CheckpointDamaged(MyxoError):
    """The last checkpoint that is left has files that are not as they were written."""


def write_digests(directory: Path) -> None:
    """Writes size and digest of every file of a directory into it. Raises OSError."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != DIGESTS)
    entries = {path.name: FileSum.read(path) for path in files}
    (directory / DIGESTS).write_text(json.dumps(entries, indent=1) + "\n")


def damage(directory: Path, rank: int = 0, world: int = 1) -> str | None:
    """Returns what is wrong with a checkpoint's directory; None where nothing is.

    Args:
        rank, world: all ranks check all sizes, but of the digests each at its share: the shards that it (or, in another layout, a
            rank of the same number modulo ``world``) wrote, and rank 0 at what is no shard.
    """
    if not (directory / DIGESTS).exists():
        return None
    try:
        entries = dict(parse_json(read_regular(directory / DIGESTS, _MOST_BYTES)))
        for name, (size, _) in entries.items():
            path = directory / name
            if not path.is_file():
                return f"{name} is gone"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, {size} were written"
        for name, (_, digest) in entries.items():
            shard = SHARD.fullmatch(name)
            if (int(shard[1]) if shard else 0) % world == rank and FileSum.read(directory / name).xxh3 != digest:
                return f"the content of {name} is not what was written"
    except (OSError, ValueError, TypeError) as error:
        return f"{DIGESTS} or a file that it names cannot be read ({error})"
    return None


def set_aside(directory: Path) -> None:
    """Renames a damaged checkpoint, which no longer counts then; the next checkpoint that is complete removes it."""
    try:
        directory.rename(directory.with_name(f".{directory.name}.{secrets.token_hex(2)}.damaged"))
    except FileNotFoundError:  # another rank on the same disk was faster
        return


METADATA, MARKER = ".metadata", "checkpoint.json"
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_DCP = "torch.distributed.checkpoint"
# What the ``.metadata`` of a checkpoint may name, besides torch's dtypes
_NAMES = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *((f"{_DCP}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip


def _enum_member(kind: Any, name: str) -> Any:
    """Does for the members of enums what ``getattr`` would do for anything: by it the early releases of Python 3.11 pickle them."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError("it takes attributes of what is no enum")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint consists of")


def check_checkpoint_files(path: Path) -> None:
    """Raises ConfigError for a checkpoint that is not made of plain files, or whose ``.metadata`` names anything foreign."""
    for entry in os.scandir(path):
        if not (stat.S_ISREG(mode := entry.stat(follow_symlinks=False).st_mode) or stat.S_ISDIR(mode)):
            raise ConfigError(str(path), entry.name, "a plain file; a checkpoint holds no links, pipes or devices")
    shard_files(path)


def shard_files(path: Path) -> set[str]:
    """Returns the names of the files that the ``.metadata`` of a checkpoint refers to. Raises ConfigError."""
    try:
        with open_regular(path / METADATA, links=True) as file:  # the operator may have linked the directory
            metadata = _MetadataUnpickler(file).load()
        for info in metadata.storage_data.values():
            if not is_plain_name(info.relative_path) or info.transform_descriptors:
                raise ValueError(f"its tensors lie in {info.relative_path!r}")
        return {info.relative_path for info in metadata.storage_data.values()}
    except Exception as error:  # whatever bytes make an unpickler raise
        expected = f"readable metadata of a checkpoint ({type(error).__name__}: {error})"
        raise ConfigError(str(path), METADATA, expected) from error


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Holds every `torch.load` in this process to tensors and plain data."""
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_WEIGHTS_ONLY) if before is None else os.environ.update({_WEIGHTS_ONLY: before})


class CheckpointParts:
    """One checkpoint on one rank.

    Args:
        target: what it will be called. partial: the directory that is written. shards: staged.
        marker: its content, without the directories. publish: makes ``partial`` appear as ``target``. tidy: removes older checkpoints.
    """

    def __init__(
        self,
        target: Path,
        partial: Path,
        shards: StagedShards,
        marker: dict[str, Any],
        publish: Callable[[], None],
        tidy: Callable[[], None],
    ) -> None:
        self.target, self.partial = target, partial
        self._shards, self._marker, self._publish, self.tidy = shards, marker, publish, tidy

    def write(self) -> list[list[Any]]:
        return self._shards.write()

    def beside(self, everyone: list[list[list[Any]]]) -> list[bytes]:
        directories = self._shards.places.as_json()
        common = {path.name: path.read_bytes() for path in self.partial.iterdir() if path.is_file() and path.suffix != ".distcp"}
        contents = []
        for number in range(len(directories)):
            marker = {**self._marker, "directories": directories, "here": number}
            files = {**common, METADATA: self._shards.index(everyone, number), MARKER: (json.dumps(marker, indent=2) + "\n").encode()}
            contents.append(msgpack.packb(files))
        return contents

    def publish(self, content: bytes) -> None:
        for name, data in msgpack.unpackb(content).items():
            (self.partial / name).write_bytes(data)
        write_digests(self.partial)
        fsync_tree(self.partial)
        self._publish()
