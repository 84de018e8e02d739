"""One service process: started in a session of its own with its output in a log file, ended together with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.runtime.embedded_servers import die_with_parent

KILL_SECONDS = 3.0

_TAIL_BYTES = 65536


@dataclass(frozen=True)
class ServiceSpec:
    """What to start: ``service`` is the kind, ``instance`` the id, ``environment`` goes on top of this process's own."""

    service: str
    instance: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A started process and its life so far. Must be made in the main thread: the child dies with the thread that forked it.

    Args:
        log_path: standard output and error are appended here.
    """

    def __init__(self, spec: ServiceSpec, log_path: Path) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.spec, self.log_path = spec, log_path
        self.ready = False
        """Whether its card has said so in this life."""
        with log_path.open("ab") as log:
            self._begin = log.tell()
            self._process = subprocess.Popen(
                spec.command,
                env={**os.environ, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,  # the launcher forks in its main thread and holds no lock there
            )
        self.started, self.started_at = time.monotonic(), time.time()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """How it ended (negative: by that signal); None while it runs. What it left running in its session is killed with it."""
        if self._process.returncode is None and self._process.poll() is not None:
            self._signal_group(signal.SIGKILL)
        return self._process.returncode

    def terminate(self) -> None:
        """Asks the service itself to stop; what it started is for it to stop."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends it and everything in its session at once. One that the kernel does not let go in `KILL_SECONDS` is left to it."""
        self._signal_group(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)

    def last_lines(self, count: int) -> list[str]:
        """The last lines it wrote in this life, empty ones left out."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._begin, end - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]

    def _signal_group(self, number: signal.Signals) -> None:
        # the group's id is the process id, for start_new_session made it the leader
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
