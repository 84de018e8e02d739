"""Small results kept for the user between commands, in ``$MYXO_CACHE``, else ``$XDG_CACHE_HOME/myxo``, else ``~/.cache/myxo``.

A cache is only a shortcut: where nothing can be read or written, the work is done again and comes to the same end.
"""

import contextlib
import os
import time
from pathlib import Path

from shared.runtime.atomic_files import replace_file

KEEP_SECONDS = 30 * 86400.0
"""Results that were not used for this long are removed."""


def directory() -> Path | None:
    """Returns where results are kept; None for a user without a home."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("MYXO_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "myxo"))
    return None


def read(name: str) -> bytes | None:
    """Returns the result of that name, or None where there is none."""
    if (cache := directory()) is None:
        return None
    with contextlib.suppress(OSError):
        content = (cache / name).read_bytes()
        os.utime(cache / name)
        return content
    return None


def write(name: str, content: bytes) -> None:
    """Keeps a result, and removes those that were not used for long."""
    if (cache := directory()) is None:
        return
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        replace_file(cache / name, content)
        for path in cache.iterdir():
            if path.is_file() and path.stat().st_mtime < time.time() - KEEP_SECONDS:
                path.unlink()
