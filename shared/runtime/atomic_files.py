"""Files and directories that appear complete or not at all, through a kill at any instant.

Each is written under a scratch name beside its target and renamed. Where a directory takes the place of an older one, that one is first
renamed to its ``.replaced`` name; a kill between the two renames leaves it there, where `settle` finds it.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".partial"
_REPLACED = ".replaced"


def replace_file(path: Path, content: bytes, *, mode: int | None = None, durable: bool = False) -> None:
    """Writes a small file; arguments and errors are those of `replacement`."""
    with replacement(path, mode=mode, durable=durable) as file:
        file.write(content)


@contextlib.contextmanager
def replacement(path: Path, *, mode: int | None = None, durable: bool = False) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of ``path`` at the end of the body, and is removed where the body fails. Raises OSError.

    Args:
        mode: its permissions; where none are given, those that the umask leaves. durable: sync it to the disk first.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def private_directory(path: Path, mode: int) -> None:
    """Makes a directory with the permissions ``mode``; one that is there gets them where it is this user's. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o777 != mode:
        path.chmod(mode)


def scratch(target: Path) -> Path:
    """Returns a new empty directory to be published as ``target``; what an earlier attempt left there is removed."""
    path = target.with_name(f".{target.name}{_PARTIAL}")
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def fsync_tree(path: Path) -> None:
    """Brings every file and directory below ``path`` to the disk."""
    for folder, _, files in os.walk(path):
        for name in files:
            _fsync(Path(folder) / name)
        _fsync(Path(folder))


def publish(finished: Path, target: Path) -> None:
    """Renames the finished (and synced) directory to ``target``, in place of an older one."""
    settle(target)
    replaced = _replaced_name(target)
    if target.exists():
        target.rename(replaced)
    finished.rename(target)
    _fsync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def settle(target: Path) -> None:
    """Completes a replacement of ``target`` that was killed half-way: restores the old directory, or finishes removing it."""
    replaced = _replaced_name(target)
    if not replaced.exists():
        return
    if target.exists():
        shutil.rmtree(replaced)
    else:
        replaced.rename(target)
        _fsync(target.parent)


def replaced_by(path: Path) -> Path | None:
    """Returns the target whose replaced directory ``path`` is; None if it is not such a directory."""
    if path.name.startswith(".") and path.name.endswith(_REPLACED):
        return path.with_name(path.name[1 : -len(_REPLACED)])
    return None


def _replaced_name(target: Path) -> Path:
    return target.with_name(f".{target.name}{_REPLACED}")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
