"""The processes of a run by their names, as they have written them down (`forking.install`), and the servers by the launcher's log."""

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

SERVERS = {"nats": "nats-server", "valkey": "valkey-server"}
"""Names of servers → their programs."""


class RunProcesses:
    """``register``: the directory of names. ``launcher``: its pid."""

    def __init__(self, register: Path, launcher: int) -> None:
        self._register, self._launcher = register, launcher

    def pids(self, target: str) -> list[int]:
        """Returns the living processes of a name, oldest first."""
        if target in SERVERS:
            return [pid for pid in children(self._launcher) if program(pid) == SERVERS[target]]
        named = [(path.stat().st_mtime_ns, int(path.name)) for path in self._register.iterdir() if _text(path) == target]
        return [pid for _, pid in sorted(named) if alive(pid)]

    def send(self, targets: Sequence[str], number: signal.Signals) -> list[int]:
        """Sends a signal to the processes of several names at once; returns whom it reached."""
        reached = []
        for pid in [pid for target in targets for pid in self.pids(target)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                reached.append(pid)
        return reached

    def left(self) -> dict[int, str]:
        """Returns the processes that still live: pid → name."""
        return {int(path.name): _text(path) for path in self._register.iterdir() if alive(int(path.name))}


def alive(pid: int) -> bool:
    """Returns whether a process lives, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def program(pid: int) -> str:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
