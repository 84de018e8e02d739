"""A process that this one starts, watches and ends. All processes of Myxo are started here.

A child has a session and a process group of its own. It never outlives its parent, however the parent ends: by a watchdog
(`shared.process.parent_watchdog`), where the child starts processes of its own that have to go too, else by the kernel's parent-death
signal alone, which costs nothing, and has to be asked for in a thread that lives as long as the child should: the main thread.

Everything here blocks; a coroutine calls `wait_ready` and `stop` by ``asyncio.to_thread``.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shared.process.parent_watchdog import ALONE, kill_descendants
from shared.runtime import failure_summary
from shared.runtime.errors import DeadlineExceeded, MyxoError

WATCHDOG = Path(__file__).with_name("parent_watchdog.py")

KILL_SECONDS = 10.0  # The seconds that a group may take to end after SIGKILL; only processes in uninterruptible sleep take longer
QUOTED_LINES, QUOTED_CHARACTERS = 20, 400
"""The lines and characters of a log that an error quotes: the end of a Python traceback and a few lines before it. SGLang prints its
settings in one line of 16 KB."""

_TAIL_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


class ProcessEnded(MyxoError):
    """A process ended before it was ready; the message ends with the last lines of its log."""


def die_with_parent() -> None:
    """Has the calling process killed when the thread of its parent that forked it ends. It works on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def with_parent(command: Sequence[str]) -> list[str]:
    """Returns the command line of a process that becomes ``command``, and is killed when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", str(WATCHDOG), ALONE, str(os.getpid()), *command]


def cause(code: int | None) -> str:
    """Returns an exit code in words."""
    return "unknown" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"


class ChildProcess:
    """One started process.

    Args:
        name: what it is, for errors. command: its command line. environment: all of it; None: this process's own.
        log_path: standard output and error are appended to it, its directory is made. None: standard input and output are the pipes
            ``stdin`` and ``stdout``, and standard error is ``errors``; None: this process's.
        watchdog: see the module. scratch: a directory that the watchdog removes when this process dies, and `stop` does otherwise.
        inherit: standard output and error are this process's, and there is no log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path | None,
        environment: Mapping[str, str] | None = None,
        *,
        watchdog: bool = False,
        scratch: Path | None = None,
        inherit: bool = False,
        errors: IO[bytes] | None = None,
    ) -> None:
        self.name, self.log_path = name, log_path
        self._scratch, self._lifeline = scratch, -1
        self._log_begin = 0
        self._ended = self._group_gone = False
        self._releasing = threading.Lock()
        self.started_s, self.started_at = time.monotonic(), time.time()
        with contextlib.ExitStack() as files:
            output, far_end = None if inherit else subprocess.PIPE, -1
            if log_path is not None:
                log_path.parent.mkdir(parents=True, exist_ok=True)
                log = files.enter_context(log_path.open("ab"))
                output, self._log_begin = log.fileno(), log.tell()
            if watchdog:
                far_end, self._lifeline = os.pipe()
                files.callback(os.close, far_end)
                command = [sys.executable, "-I", "-S", str(WATCHDOG), str(far_end), str(scratch or ""), *command]
            else:
                command = with_parent(command)
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE if log_path is None and not inherit else subprocess.DEVNULL,
                stdout=output,
                stderr=errors if log_path is None else output,
                start_new_session=True,
                pass_fds=(far_end,) if watchdog else (),
            )
        self.pid, self.stdin, self.stdout = self._process.pid, self._process.stdin, self._process.stdout

    def exit_code(self) -> int | None:
        """Returns the exit code (negative: the signal), None while it runs. Processes that it left running are killed."""
        code = self._process.poll()
        if code is not None and not self._ended:
            self._ended = True
            self.kill()
        return code

    def running(self) -> bool:
        return self.exit_code() is None

    def members(self) -> list[int]:
        """Returns the living processes of its group, sorted, the watchdog among them."""
        if self._group_gone:
            return []
        self._process.poll()  # reaps it: a zombie would keep the group's number
        found = group_members(self.pid)
        self._group_gone = not found  # from now on the number may belong to others
        return found

    def terminate(self) -> None:
        """Sends SIGTERM to the process itself, which has to stop its own children."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kills the whole group without waiting, and under a watchdog what has left the group."""
        if self.members():
            if self._lifeline >= 0:
                kill_descendants(self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, deadline_s: float) -> int:
        """Returns the exit code. Raises DeadlineExceeded."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(deadline_s)
        raise DeadlineExceeded("its end", self.name, deadline_s, "it still runs")

    def stop(self, grace_s: float) -> None:
        """Asks the process to stop, kills the group after ``grace_s``, and returns when all of it has ended.

        Raises MyxoError where a process outlived SIGKILL by `KILL_SECONDS`.
        """
        if grace_s > 0:
            self.terminate()
            with contextlib.suppress(DeadlineExceeded):
                self.wait(grace_s)
        self.kill()
        end = time.monotonic() + KILL_SECONDS
        while left := self.members():
            if time.monotonic() > end:
                raise MyxoError(f"processes {left} of {self.name} outlived SIGKILL by {KILL_SECONDS:g} s")
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a dead process can be reaped once the last of its threads has ended
            self._process.wait(KILL_SECONDS)
        with self._releasing:  # two threads may stop it at once, and the second would close somebody else's descriptor
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def wait_ready(self, answers: Callable[[], bool], awaited: str, deadline_s: float, pause_s: float = 0.05) -> float:
        """Returns after how many seconds the process was ready.

        Args:
            answers: whether it is; asked every ``pause_s``. awaited: what proves it, for the error.

        Raises ProcessEnded, or DeadlineExceeded while it still runs; both quote the end of its log.
        """
        begin = time.monotonic()
        while self.running():
            if answers():
                return time.monotonic() - begin
            if time.monotonic() - begin >= deadline_s:
                raise DeadlineExceeded(awaited, f"the starting {self.name}", deadline_s, f"it should be stopped; {self.quoted_log()}")
            time.sleep(pause_s)
        words = failure_summary.of_log(self.last_lines())
        raise ProcessEnded(f"{self.name} ended before it was ready, with {cause(self.exit_code())}: {words}; {self.quoted_log()}")

    def last_lines(self, count: int | None = None) -> list[str]:
        """Returns the last lines that it has logged in this life, empty ones left out."""
        if self.log_path is None or not self.log_path.is_file():
            return []
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begin if self._log_begin <= size else 0, size - _TAIL_BYTES))  # one that was rotated begins anew
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines if count is None else lines[-count:]

    def quoted_log(self) -> str:
        """Returns the end of its log for an error."""
        lines = [line[:QUOTED_CHARACTERS] for line in self.last_lines(QUOTED_LINES)]
        return f"the end of its log {self.log_path}:\n" + ("\n".join(lines) or "(empty)")


def group_members(group: int) -> list[int]:
    """Returns the living processes of a process group, sorted. It reads ``/proc/*/stat``, fields 3 and 5 (proc(5))."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while being looked at
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                members.append(int(stat.parent.name))
    return sorted(members)


FROZEN_SECONDS = 10.0  # The time after which a process that a signal has stopped counts as one that does not continue
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
