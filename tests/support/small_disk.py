"""A disk of its own for a test, small enough to fill: a tmpfs, mounted where only this process and its children see it."""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_NEW_MOUNTS = 0x00020000
"""CLONE_NEWNS of unshare(2)."""


class SmallDisk:
    """The disk at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / ".filler"

    def fill(self, free: int = 0) -> None:
        """Takes the room that there is, but for ``free`` bytes."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_frsize - size >= free:
                        file.write(bytes(size))

    def clear(self) -> None:
        """Gives the room back."""
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """Mounts a disk of ``size`` (as mount takes it) at ``path``; skips the test where this process may not."""
    path.mkdir(parents=True, exist_ok=True)
    if os.geteuid() or ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        pytest.skip("no mount namespace can be made here: a full disk needs root")
    if subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode:
        pytest.skip("mounts cannot be made private here")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], capture_output=True)
