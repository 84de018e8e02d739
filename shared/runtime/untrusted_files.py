"""Reads files that another account or another machine wrote.

Only regular files are opened, under plain names: a link could lead out of the directory, a pipe or a device would block for ever. JSON is
read only so deep that no later reader of the value runs out of stack.
"""

import errno
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_DEPTH = 64
"""The most levels of lists and objects that JSON may have; what people write has fewer than twenty."""

MAX_NAME = 255
"""The most characters that a file's name may have, as on Linux's file systems."""


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


def parse_json(text: str | bytes, parse_float: Callable[[str], float] | None = None) -> Any:
    """Returns the value of a JSON text; ``parse_float`` makes its numbers with decimals or exponents.

    Raises ValueError, also for one of more than `MAX_DEPTH` levels.
    """
    try:
        value = json.loads(text, parse_float=parse_float)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in (outer.values() if type(outer) is dict else outer)]
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} deep")
