"""Keeps the pickles of a checkpoint from running code, wherever the directory came from.

PyTorch unpickles ``.metadata``, and would unpickle the entries that are no tensors (random states, say). The former is read here first, by
an unpickler that knows the dozen names which such a file has; for the latter `torch.load` is held to ``weights_only``.
"""

import contextlib
import enum
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import is_plain_name, open_regular

METADATA = ".metadata"

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"

_DCP = "torch.distributed.checkpoint"

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
"""What the ``.metadata`` of a checkpoint may name, besides torch's dtypes."""


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
