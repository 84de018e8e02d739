"""Starts one engine's processes, proves them ready, and stops them with none left behind.

The engine runs under the watchdog of `shared.process.child_process`, since it starts processes of its own. ``/health`` answers 200 before
an engine can generate, so only a real generation proves that it is ready.
"""

import asyncio
import http.client
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from services.rollout.engine.launch_command import EngineCommand
from services.rollout.engine.private_endpoints import DIRECTORY_VARIABLE, SOCKET
from shared.process import child_process as process_watch
from shared.process.child_process import ChildProcess, ProcessWatch, cause
from shared.runtime import failure_summary
from shared.runtime.errors import ConfigError

SEARCH_SECONDS = 10.0
"""The interval at which an engine is searched for processes to watch: those on further nodes start theirs one after the other."""

TITLE = "sglang::"
"""How the names of SGLang's own processes begin: schedulers, the detokenizer, what controls data parallelism."""

PROBE_SECONDS = 10.0
"""The deadline for one probe of a starting engine: the first request on a busy small machine takes seconds."""

PREFIX = "myxo-engine-"
LONGEST_DIRECTORY = 107 - len("/rank-1023.opening")
"""The most bytes of the name of an engine's directory: that of a socket has no more than 107."""

_MISSED = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed[^.]*")
"""What SGLang logs of a process that is gone, before it ends the others."""

_ONE_TOKEN = json.dumps({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}})


class EngineProcess(ChildProcess):
    """An engine that this service has launched.

    SGLang checks for SIGTERM every 5 s and finishes running requests first: abort them before `stop`.

    Args:
        command: from ``engine_command``.
        log_file: the engine's output is appended to it; its directory is made.

    Raises ConfigError where the directory for temporary files has too long a name.

    Attributes:
        receiver: the private directory in which its server and its ranks listen; it is removed with the engine.
    """

    def __init__(self, command: EngineCommand, log_file: Path) -> None:
        self.receiver = Path(tempfile.mkdtemp(prefix=PREFIX))
        if len(os.fsencode(self.receiver)) > LONGEST_DIRECTORY:
            self.receiver.rmdir()
            expected = f"at most {LONGEST_DIRECTORY - len(PREFIX) - 9} bytes: an engine's sockets lie below it"
            raise ConfigError("TMPDIR", tempfile.gettempdir(), expected)
        metrics = self.receiver / "metrics"  # SGLang's own temporary directory would stay behind when the engine is killed
        metrics.mkdir()
        private = {DIRECTORY_VARIABLE: str(self.receiver), "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        environment = os.environ | command.env | private
        self._watch, self._searched = ProcessWatch(), 0.0
        super().__init__(f"engine at {self.receiver}", command.argv, log_file, environment, watchdog=True, scratch=self.receiver)

    async def ready(self, deadline: float) -> float:
        """Returns the seconds until the engine has answered a real generation. Raises as `ChildProcess.wait_ready`."""
        return await asyncio.to_thread(self.wait_ready, self._answers, "a first generation", deadline)

    def fault(self) -> str:
        """Returns in words why this engine cannot be used any more; empty while it can.

        It cannot without one of its processes. SGLang finds that out as well, but first waits a minute for dumps of its GPUs' memory; and
        it waits for ever for a process that is stopped.
        """
        if (code := self.exit_code()) is not None:
            return f"ended with {cause(code)}: {self.last_words()}"
        now = time.monotonic()
        if not self._searched or now - self._searched > SEARCH_SECONDS:
            self._searched = now
            found = process_watch.descendants(self.pid)
            server = [one for one in found if one.parent == self.pid][:1]  # the others are orphans, which the watchdog takes in
            self._watch.add([*server, *(one for one in found if one.name.startswith(TITLE))])
        if not (fault := self._watch.fault(process_watch.seen(self._watch.pids), now)):
            return ""
        lines = self.last_lines()
        if missed := missed_in(lines):  # SGLang has found out first, and ends what is left: the first that is gone may not be the cause
            return f"is ending: {missed}"
        return f"{fault}, after {raised}" if (raised := raised_in(lines)) else fault

    def last_words(self) -> str:
        """Returns why an engine has ended, by its log: the last exception, or which of its processes SGLang has missed."""
        return engine_end(self.last_lines())

    def _answers(self) -> bool:
        connection = UnixConnection(self.receiver / SOCKET, PROBE_SECONDS)
        try:
            connection.request("POST", "/generate", _ONE_TOKEN, {"Content-Type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # not listening yet, or too busy: wait_ready has the deadline
            return False
        finally:
            connection.close()


def engine_end(lines: Sequence[str]) -> str:
    """Returns why an engine has ended, by the last lines of its log: which of its processes SGLang has missed and what was raised before,
    not what comes of it; else its last exception or line."""
    return missed_in(lines) or failure_summary.of_log(lines)


def missed_in(lines: Sequence[str]) -> str:
    """Returns which of its processes SGLang has missed, and what was raised before; empty where it says nothing of that."""
    for index, line in enumerate(lines):
        if found := _MISSED.search(line):
            before = raised_in(lines[:index])
            return failure_summary.short(f"{found[0]}, after {before}") if before else found[0]
    return ""


def raised_in(lines: Sequence[str]) -> str:
    """Returns the last exception in the lines of a log; empty where there is none."""
    found = failure_summary.of_log(lines)
    return found if lines and found != failure_summary.short(lines[-1]) else ""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, for code that blocks. ``timeout``: seconds for each step."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("engine", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
