"""One version of the weights on disk, a link of a chain: a whole Hugging Face checkpoint, or what changed since the version before it.

A link is a directory ``v000012`` with a small ``link.json``: what the version is (its digest, every tensor's dtype, shape and digest),
what the directory holds (every file's size and xxh3), and for a delta on which version it lies. Directories appear complete or not at
all (`shared.runtime.atomic_files`), and are never changed afterwards.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from shared.runtime.errors import MyxoError
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.manifest import ITEM_BYTES
from shared.transfer.snapshot_delta import Encoding

FORMAT = 1
LINK_FILE = "link.json"

_NAME = re.compile(r"v(\d{6,})\Z")
_BLOCK = 8 * 1024**2

SnapshotKind = Literal["full", "delta"]


class BrokenLink(MyxoError):
    """A version on disk that cannot be used: a missing, torn or altered link. ``version``: which one."""

    def __init__(self, version: int, path: Path, reason: str) -> None:
        self.version, self.path, self.reason = version, path, reason
        super().__init__(f"version {version} cannot be had from {path}: {reason}")


@dataclass(frozen=True)
class FileSum:
    """``xxh3``: 32 hexadecimal digits, of 128 bits."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class SnapshotLink:
    """What ``link.json`` says.

    Args:
        path: the link's directory. digest: of the version. tensors: all of the version's, whatever of them the files hold.
        files: all files of the directory but ``link.json``. base: version and digest that a delta lies on. encoding: a delta's.
        at: seconds since the epoch.
    """

    path: Path
    version: int
    kind: SnapshotKind
    digest: str
    tensors: dict[str, TensorDigest]
    files: dict[str, FileSum]
    base: tuple[int, str] | None = None
    encoding: Encoding | None = None
    at: float = 0.0
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", sum(file.bytes for file in self.files.values()))

    def weights(self) -> list[Path]:
        """The files of tensors."""
        return [self.path / name for name in sorted(self.files) if name.endswith(".safetensors")]

    def write(self) -> None:
        """Puts ``link.json`` into the link's directory."""
        fields = {
            "format": FORMAT,
            "version": self.version,
            "kind": self.kind,
            "digest": self.digest,
            "base": None if self.base is None else {"version": self.base[0], "digest": self.base[1]},
            "encoding": self.encoding,
            "at": self.at,
            "files": {name: {"bytes": file.bytes, "xxh3": file.xxh3} for name, file in self.files.items()},
            "tensors": {name: [known.dtype, list(known.shape), f"{known.digest:016x}"] for name, known in self.tensors.items()},
        }
        (self.path / LINK_FILE).write_text(json.dumps(fields, separators=(",", ":")) + "\n")

    @classmethod
    def read(cls, path: Path) -> SnapshotLink:
        """Raises BrokenLink: no link there, or one that contradicts itself. Its files are not looked at."""
        version = version_of(path)
        if version is None:
            raise BrokenLink(-1, path, "no directory of a version: those are called v000012")
        try:
            return _parsed(path, version, json.loads((path / LINK_FILE).read_text()))
        except FileNotFoundError:
            raise BrokenLink(version, path, "it is missing" if not path.exists() else f"it has no {LINK_FILE}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenLink(version, path, f"its {LINK_FILE} cannot be read: {type(error).__name__}: {error}") from error

    def check_sizes(self) -> None:
        """Looks at every file, without reading it. Raises BrokenLink."""
        for name, expected in self.files.items():
            try:
                size = (self.path / name).stat().st_size
            except OSError as error:
                raise BrokenLink(self.version, self.path, f"{name}: {error.strerror}") from error
            if size != expected.bytes:
                raise BrokenLink(self.version, self.path, f"{name} is {size} bytes, not {expected.bytes}")

    def check_files(self) -> None:
        """Reads every file. Raises BrokenLink naming the first that is not what it was."""
        self.check_sizes()
        for name, expected in self.files.items():
            try:
                found = sum_of(self.path / name)
            except OSError as error:
                raise BrokenLink(self.version, self.path, f"{name}: {error.strerror}") from error
            if found != expected:
                raise BrokenLink(self.version, self.path, f"{name} is altered: its xxh3 is not the one that it was written with")


def directory_name(version: int) -> str:
    return f"v{version:06d}"


def version_of(path: Path) -> int | None:
    """The version that a directory is called after; None where it is none of ours."""
    match = _NAME.match(path.name)
    return int(match[1]) if match else None


def sum_of(path: Path) -> FileSum:
    """Size and xxh3 of a file."""
    whole, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            whole.update(block)
            size += len(block)
    return FileSum(size, whole.hexdigest())


def _parsed(path: Path, version: int, fields: dict[str, Any]) -> SnapshotLink:
    if fields["format"] != FORMAT:
        raise ValueError(f"format {fields['format']!r}; this side reads {FORMAT}")
    if fields["version"] != version:
        raise ValueError(f"it says that it is version {fields['version']!r}")
    tensors = {}
    for name, (dtype, shape, digest) in fields["tensors"].items():
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: dtype {dtype!r}")
        tensors[name] = TensorDigest(dtype, tuple(int(length) for length in shape), int(digest, 16))
    files = {name: FileSum(int(file["bytes"]), str(file["xxh3"])) for name, file in fields["files"].items()}
    for name in files:
        if name != os.path.basename(name) or name in ("", ".", "..", LINK_FILE):
            raise ValueError(f"a file called {name!r}")
    kind, base, encoding = fields["kind"], fields["base"], fields["encoding"]
    if kind not in ("full", "delta") or (kind == "delta") != (base is not None) or encoding not in (None, "xor", "overwrite"):
        raise ValueError(f"kind {kind!r}, encoding {encoding!r}, base {base!r}")
    if version_digest(tensors) != fields["digest"]:
        raise ValueError("its digest is not that of its tensors")
    lies_on = None if base is None else (int(base["version"]), str(base["digest"]))
    if lies_on is not None and lies_on[0] >= version:
        raise ValueError(f"it lies on version {lies_on[0]}")
    return SnapshotLink(path, version, kind, fields["digest"], tensors, files, lies_on, encoding, float(fields["at"]))
