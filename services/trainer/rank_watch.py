"""Ends the ranks of a machine where a signal has stopped one: the others would wait for it in a collective for as long as that may take."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable

import structlog

from shared.process import child_process
from shared.process.child_process import FROZEN_SECONDS, PROC, STOPPED_STATE, SeenProcess
from shared.runtime.errors import MyxoError

LOOK_SECONDS = 1.0


class RankFrozen(MyxoError):
    """A rank was stopped by a signal, and did not go on."""


class StoppedProcesses:
    """Follows which processes are stopped. Pure."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}

    def look(self, present: Iterable[SeenProcess], now: float) -> SeenProcess | None:
        """Returns one that has been stopped for `FROZEN_SECONDS`. ``now``: monotonic seconds."""
        stopped = {process.identity: process for process in present if process.state == STOPPED_STATE}
        self._since = {identity: self._since.get(identity, now) for identity in stopped}
        return next((stopped[identity] for identity, since in self._since.items() if now - since >= FROZEN_SECONDS), None)


class RankWatch:
    """Watches this process's own children, the ranks. ``frozen``: in words which one was stopped; empty while none was."""

    def __init__(self) -> None:
        self.frozen = ""
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def _watch(self) -> None:
        stopped = StoppedProcesses()
        while not self.frozen:
            time.sleep(LOOK_SECONDS)
            ranks = [process for process in child_process.descendants(os.getpid()) if process.parent == os.getpid()]
            if (found := stopped.look(ranks, time.monotonic())) is None:
                continue
            self.frozen = f"rank {_rank(found.pid)} was frozen: a signal had stopped its process {found.pid} for {FROZEN_SECONDS:g} s"
            structlog.get_logger().error("rank_frozen", error=self.frozen)
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def _rank(pid: int) -> str:
    """Returns the rank that torchrun has given a process, by its environment."""
    with contextlib.suppress(OSError):
        for entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return entry[5:].decode()
    return "of unknown number"
