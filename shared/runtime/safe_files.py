"""Files and directories that appear complete or not at all, through a kill at any instant; files of others, read within limits.

Each is written under a scratch name beside its target and renamed. Where a directory takes the place of an older one, that one is first
renamed to its ``.replaced`` name; a kill between the two renames leaves it there, where `settle` finds it.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shared.runtime.errors import DeadlineExceeded

LOCK_POLL_S = 0.1
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


MAX_DEPTH = 64  # The most levels of lists and objects that JSON may have; what people write has fewer than twenty
MAX_NAME = 255  # The most characters that a file's name may have, as on Linux's file systems


def is_plain_name(name: object) -> bool:
    """Returns whether this names an entry of a directory: no path, no ``..``, no character that is not printed."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() and "/" not in name and name not in (".", "..")


def open_regular(path: Path, *, links: bool = False, writable: bool = False) -> io.BufferedReader | io.BufferedRandom:
    """Opens a regular file without waiting.

    Args:
        links: follow symbolic links, which is for directories of the operator's own. Otherwise neither the file nor the directory that
            holds it may be one.

    Raises:
        OSError: there is none, its name is not plain, or it is a link, a directory, a pipe or a device.
    """
    if not is_plain_name(path.name) or "\0" in str(path):
        raise OSError(errno.EINVAL, "its name is not plain", str(path))
    follow = 0 if links else os.O_NOFOLLOW
    if not links and (path.is_symlink() or path.parent.is_symlink()):
        raise OSError(errno.ELOOP, "a symbolic link, which is not followed here", str(path))
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow)
    try:
        flags = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | follow  # a pipe without a writer is opened at once
        descriptor = os.open(path.name, flags | (os.O_RDWR if writable else os.O_RDONLY), dir_fd=directory)
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "r+b") if writable else open(descriptor, "rb")


def read_regular(path: Path, limit: int, *, links: bool = False) -> bytes:
    """Returns the content of a file as `open_regular` opens it. Raises OSError, also for one of more than ``limit`` bytes."""
    with open_regular(path, links=links) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(path))
    return content


@contextlib.contextmanager
def locked(path: Path, seconds: float, what: str) -> Iterator[None]:
    """Holds a lock, the kernel's, which ends with its process: for ``what`` only one may make. Raises DeadlineExceeded, OSError."""
    ends = time.monotonic() + seconds
    with path.open("ab") as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > ends:
                raise DeadlineExceeded(what, f"the process that holds {path}", seconds, "given up")
            time.sleep(LOCK_POLL_S)
        yield


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice; leave one out")
    return found


def parse_json(text: str | bytes, parse_float: Callable[[str], float] | None = None, *, once: bool = False) -> Any:
    """Returns the value of a JSON text; ``parse_float`` makes its numbers with decimals or exponents. ``once``: refuses a key that an
    object has twice.

    Raises ValueError, also for one of more than `MAX_DEPTH` levels.
    """
    try:
        value = json.loads(text, parse_float=parse_float, object_pairs_hook=_unique_keys if once else None)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in (outer.values() if type(outer) is dict else outer)]
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} deep")
