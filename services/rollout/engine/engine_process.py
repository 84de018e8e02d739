"""One engine's processes: started, proved ready, stopped, and none left behind.

Invariant: no process of an engine outlives its ``EngineProcess``, nor the service that holds it. The engine runs under
a leash (see ``leash``) in a session and process group of its own; stopping it ends that whole group.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from services.rollout.engine.engine_errors import EngineStartError
from services.rollout.engine.launch_command import EngineCommand
from shared.runtime.errors import DeadlineExceeded, MyxoError

LEASH = Path(__file__).with_name("parent_watchdog.py")

LOG_LINES_IN_ERRORS = 20
"""A Python traceback's end and a few lines before it."""

LOG_BYTES_READ = 64 * 1024
"""From the end: SGLang prints all its settings in one line of 16 KB."""

COMPLAINT = re.compile(r"^[\w.]*(?:Error|Exception)\b|: error: ")
"""The last line of a traceback, or argparse's complaint."""

RECEIVER_VARIABLE = "MYXO_RECEIVER"
"""Tells an engine's schedulers where to listen."""

READY = "ready to roll"
"""SGLang's own word for it. Errors before it did no harm: it calls its own server before that listens, for example."""

PROBE_SECONDS = 10.0
"""For one probe while starting: the first request of a busy small machine may take seconds."""

KILL_SECONDS = 10.0
"""For a group to vanish after SIGKILL; only processes in uninterruptible sleep take longer."""


class EngineProcess:
    """An engine launched by this service.

    Args:
        command: from ``engine_command``.
        log_file: gets the engine's output, appended; its directory is made.
    """

    def __init__(self, command: EngineCommand, log_file: Path) -> None:
        self.command, self.log_file = command, log_file
        self._leash: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.receiver: Path | None = None  # where its ranks listen for orders about weights: a private directory, while it runs
        self._gone = False  # the group was seen empty: its number may belong to others from now on

    @property
    def url(self) -> str:
        """Where the engine answers once it is ready."""
        return self.command.url

    @property
    def group(self) -> int:
        """The process group of the engine. Raises EngineStartError before ``start``."""
        if self._leash is None:
            raise EngineStartError(f"the engine at {self.url} was not started")
        return self._leash.pid

    def start(self) -> None:
        """Start the engine; returns at once.

        Raises:
            EngineStartError: it was started before, or somebody listens on its port, who would answer in its place.
        """
        if self._leash is not None:
            raise EngineStartError(f"the engine at {self.url} was started already (process group {self._leash.pid})")
        if _listened_on(self.url):
            raise EngineStartError(f"the engine cannot be started at {self.url}: somebody listens there; give it another port")
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.receiver = Path(tempfile.mkdtemp(prefix="myxo-engine-"))
        metrics = self.receiver / "metrics"  # SGLang's own temporary directory would stay behind when the engine is killed
        metrics.mkdir()
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._leash = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LEASH), *self.command.argv],
                env=os.environ | self.command.env | {RECEIVER_VARIABLE: str(self.receiver), "PROMETHEUS_MULTIPROC_DIR": str(metrics)},
                stdin=subprocess.PIPE,  # never written; its end is how the leash learns that this service is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Whether the engine's main process runs. A dead one's remaining processes are killed."""
        if self._leash is None:
            return False
        if self._leash.poll() is None:
            return True
        self._signal_group(signal.SIGKILL)
        return False

    async def wait_ready(self, deadline: float) -> float:
        """Wait until the engine has answered a real generation.

        Args:
            deadline: seconds from now.

        Returns:
            Seconds waited.

        Raises:
            EngineStartError: its process ended, and with it all of its group; the message quotes the end of its log.
            DeadlineExceeded: it still runs but has not answered; the message quotes the end of its log.
        """
        begin = time.monotonic()
        async with aiohttp.ClientSession() as session:
            while True:
                if not self.alive():
                    await self._until(self._group_is_gone, KILL_SECONDS)
                    raise EngineStartError(
                        f"the engine at {self.url} ended before it was ready, with {self.cause_of_death()}; "
                        f"the end of its log {self.log_file}:\n{self.log_tail()}"
                    )
                waited = time.monotonic() - begin
                if waited >= deadline:
                    raise DeadlineExceeded(
                        "a first generation",
                        f"the starting engine at {self.url}",
                        deadline,
                        f"it should be stopped; the end of its log {self.log_file}:\n{self.log_tail()}",
                    )
                if await self._answers(session, min(PROBE_SECONDS, deadline - waited)):
                    return time.monotonic() - begin
                await asyncio.sleep(0.1)

    async def stop(self, deadline: float) -> None:
        """End the engine: SIGTERM, which lets SGLang release its device, then SIGKILL for the whole group.

        Args:
            deadline: seconds from now that SIGTERM gets. SGLang looks for it every 5 s, and finishes running requests
                first: abort them before. 0 kills at once.

        Raises:
            MyxoError: a process of the group survived SIGKILL.
        """
        if self._leash is None:
            return
        if deadline > 0 and self._leash.poll() is None:
            self._leash.send_signal(signal.SIGTERM)  # passed on to the main process, which ends its children
            await self._until(lambda: self._leash is None or self._leash.poll() is not None, deadline)
        self._signal_group(signal.SIGKILL)
        if not await self._until(self._group_is_gone, KILL_SECONDS):
            raise MyxoError(f"processes {self.processes()} of the engine at {self.url} outlived SIGKILL {KILL_SECONDS:g} s")
        if self._leash.stdin is not None:
            self._leash.stdin.close()
        if self.receiver is not None:
            shutil.rmtree(self.receiver, ignore_errors=True)
            self.receiver = None

    def processes(self) -> list[int]:
        """The pids of the engine's group, the leash included, zombies not. From /proc."""
        return group_members(self.group)

    def log_tail(self, lines: int = LOG_LINES_IN_ERRORS) -> str:
        """The last lines that this engine wrote; long ones are cut."""
        return "\n".join(self._last_lines()[-lines:]) or "(empty)"

    def cause_of_death(self) -> str:
        """The exit status of a dead engine, and the last line in its log that names an error, if one does."""
        lines = self._last_lines()
        ready = max((number for number, line in enumerate(lines) if READY in line), default=-1)
        complaints = [line for line in lines[ready + 1 :] if COMPLAINT.search(line)]
        return f"status {self._status()}" + (f": {complaints[-1].strip()}" if complaints else "")

    def _last_lines(self) -> list[str]:
        """What this engine wrote last, at most ``LOG_BYTES_READ``."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, log.tell() - LOG_BYTES_READ))
                return [line[:400] for line in log.read().decode(errors="replace").splitlines()]
        except FileNotFoundError:
            return ["(no log)"]

    async def _answers(self, session: aiohttp.ClientSession, seconds: float) -> bool:
        """Whether the engine generates one token now. /health answers 200 before it can, so it proves nothing."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with session.post(f"{self.url}/generate", json=body, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):  # not listening yet, or too busy: wait_ready has the deadline
            return False

    def _status(self) -> str:
        code = self._leash.poll() if self._leash is not None else None
        if code is None:
            return "unknown"
        number = -code if code < 0 else code - 128 if code > 128 else 0
        return f"{code} ({signal.Signals(number).name})" if number in set(signal.Signals) else str(code)

    def _signal_group(self, number: signal.Signals) -> None:
        if not self._group_is_gone():
            os.killpg(self.group, number)

    def _group_is_gone(self) -> bool:
        if self._leash is not None:
            self._leash.poll()  # reaps the leash, which would keep the group otherwise
        self._gone = self._gone or not self.processes()
        return self._gone

    @staticmethod
    async def _until(condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(0.05)
        return True


def _listened_on(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((address.hostname, address.port)) == 0


def group_members(group: int) -> list[int]:
    """The living processes of a process group, sorted. From ``/proc/*/stat``, fields 3 and 5 (proc(5))."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _parent, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # ended while being looked at
            continue
        if int(its_group) == group and state != "Z":
            members.append(int(entry.name))
    return sorted(members)
