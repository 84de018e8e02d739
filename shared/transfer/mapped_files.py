"""Files in memory by which trainer and engine of one host share buffers where there is no GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

FILE_PREFIX = "myxo-weights-"
"""How the files are called: nobody opens another one because a store says so."""


def directory() -> Path:
    """Where they lie: Linux's file system in memory, else what the system has for temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def is_buffer(path: Path) -> bool:
    """Whether a path may be one of them."""
    return path.parent == directory() and path.name.startswith(FILE_PREFIX)
