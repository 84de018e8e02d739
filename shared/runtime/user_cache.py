"""Small results kept for the user between commands, in ``$MYXO_CACHE``, else ``$XDG_CACHE_HOME/myxo``, else ``~/.cache/myxo``.

Only ever a shortcut: where nothing can be read or written, the work is done again, to the same end.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

KEEP_SECONDS = 30 * 86400.0
"""Results that were not used for so long are removed."""


def directory() -> Path | None:
    """Returns where results are kept; None for a user without a home."""
    if own := os.environ.get("MYXO_CACHE"):
        return Path(own)
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "myxo"
    try:
        return Path.home() / ".cache" / "myxo"
    except RuntimeError:
        return None


def read(name: str) -> bytes | None:
    """Returns the result of that name, or None where there is none."""
    if (kept := directory()) is None:
        return None
    with contextlib.suppress(OSError):
        content = (kept / name).read_bytes()
        os.utime(kept / name)
        return content
    return None


def write(name: str, content: bytes) -> None:
    """Keeps a result, and removes those that were not used for long."""
    if (kept := directory()) is None:
        return
    with contextlib.suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
        replace(kept / name, content)
        for path in kept.iterdir():
            if path.is_file() and path.stat().st_mtime < time.time() - KEEP_SECONDS:
                path.unlink()


def replace(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees all of it or what was there before. Raises OSError."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
