"""Watches the processes of a program that consists of several: one that has ended, or is frozen, ends the use of all of them.

A program's own supervision may take minutes, or wait for a process that was stopped. It reads ``/proc`` (proc(5)): on Linux only, elsewhere
nothing is watched.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FROZEN_SECONDS = 10.0
"""The time after which a process that a signal has stopped counts as one that does not go on."""

PROC = Path("/proc")
ENDED_STATES, STOPPED_STATE = "ZXx", "T"


@dataclass(frozen=True)
class SeenProcess:
    """A process at one moment. ``started``: clock ticks after the machine's start; with ``pid`` no other process has it."""

    pid: int
    parent: int
    started: int
    state: str
    name: str

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.started


def parsed(stat: str) -> SeenProcess:
    """Returns the process of a ``/proc/PID/stat``: fields 1 to 4, and 22."""
    head, _, tail = stat.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    return SeenProcess(int(pid), int(fields[1]), int(fields[19]), fields[0], name)


def seen(pids: Iterable[int]) -> Iterator[SeenProcess]:
    """Yields those of the processes that are there, zombies among them."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            yield parsed((PROC / str(pid) / "stat").read_text(errors="replace"))


def descendants(root: int) -> list[SeenProcess]:
    """Returns the living processes below one, and that one, in the order of generations; the children of each, the oldest first."""
    every = sorted(seen(int(entry.name) for entry in PROC.glob("[0-9]*")), key=lambda process: process.started)
    found = [process for process in every if process.pid == root]
    for process in found:
        found += [child for child in every if child.parent == process.pid and child.pid != root]
    return [process for process in found if process.state not in ENDED_STATES]


class ProcessWatch:
    """Remembers processes, and says what has become of them. Pure: its caller looks."""

    def __init__(self) -> None:
        self._watched: dict[int, SeenProcess] = {}
        self._stopped_since: dict[int, float] = {}

    @property
    def pids(self) -> list[int]:
        return list(self._watched)

    def add(self, processes: Iterable[SeenProcess]) -> None:
        """Watches these from now on, beside those before."""
        self._watched = {process.pid: process for process in processes} | self._watched  # another thread may be looking

    def fault(self, present: Iterable[SeenProcess], now: float) -> str:
        """Returns which process is gone, or has been stopped for too long; empty: none. ``now``: monotonic seconds."""
        there = {process.identity: process for process in present if process.state not in ENDED_STATES}
        for process in self._watched.values():
            found = there.get(process.identity)
            if found is None:
                return f"has lost its process {process.pid} ({process.name})"
            if found.state != STOPPED_STATE:
                self._stopped_since.pop(process.pid, None)
            elif (waited := now - self._stopped_since.setdefault(process.pid, now)) >= FROZEN_SECONDS:
                return f"is frozen: its process {process.pid} ({process.name}) has been stopped for {waited:.0f} s"
        return ""
