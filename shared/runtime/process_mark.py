"""Finds whether a process of this machine is certainly dead, from the mark that it left. Linux only; elsewhere that is not known.

A mark is ``boot/namespace/pid/started``. Where boot and pid namespace are the reader's own, a live process of that mark stands in the
reader's process table: the inode of a namespace belongs to one namespace at a time, and a pid that was given to somebody else has
another start time. Where they differ (another machine, another container) nothing is said.
"""

import contextlib
import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def mark() -> str:
    """Returns the mark of this process; empty if others could not check it."""
    try:
        return f"{_BOOT.read_text().strip()}/{os.readlink(_NAMESPACE)}/{os.getpid()}/{_started(os.getpid())[0]}"
    except OSError:
        return ""


def certainly_dead(other: str) -> bool:
    """Returns whether the process of a mark has certainly ended; False if it lives, or if that cannot be known here."""
    own = mark().split("/")
    parts = other.split("/")
    if len(own) != 4 or len(parts) != 4 or own[:2] != parts[:2] or not parts[2].isdecimal() or not int(parts[2]):
        return False
    try:
        with contextlib.suppress(PermissionError):  # a process of another user: it exists
            os.kill(int(parts[2]), 0)  # asks and does nothing; a /proc that hides other users' processes cannot be asked
        started, state = _started(int(parts[2]))
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return started != parts[3] or state in "ZX"


def _started(pid: int) -> tuple[str, str]:
    """Returns when a process started (clock ticks since boot), and its state. The name in front of them may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[19], fields[0]
