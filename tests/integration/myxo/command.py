"""``myxo`` as a process of its own (`tests.support.fork_server`), and looking at what it started and wrote."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from myxo.main import main
from shared.process.child_process import with_parent
from tests.support.fork_server import ForkServerPopen
from tests.support.service_process import processes
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]

STANDINS = {service: f"tests.integration.myxo.standin_{service}" for service in ("rollout", "trainer")}
"""The modules in the places of rollout and trainer; everything else is the real thing."""

COMMAND_SECONDS = 240
"""What a command may take on a machine that is busy with other things."""


class Myxo:
    """``myxo`` as a process. ``standins``: rollout and trainer are the quick ones of this directory."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str | Path, standins: bool = False, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command; its output can be read from the process's pipes. It is killed when the test ends."""
        module = "tests.integration.myxo.standin_myxo" if standins else "myxo.main"
        process = ForkServerPopen(
            with_parent([sys.executable, "-m", module, *map(str, words)]),
            cwd=ROOT,
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *words: str | Path, standins: bool = False, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
        """Runs a command to its end: exit code, standard output, standard error. Without services it runs in this process."""
        if standins:
            return ended(self.start(*words, standins=True, environment=environment))
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {**self.environment, **(environment or {})}, clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                code = main([*map(str, words)])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        return code, out.getvalue(), err.getvalue()

    def dry_run(self, config: Path, *flags: str) -> tuple[int, str]:
        """Exit code and standard error of ``myxo up --dry-run``, in this process."""
        code, _, err = self.run("up", config, "--dry-run", *flags)
        return code, err


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Waits for the process: exit code, standard output, standard error."""
    out, err = process.communicate(timeout=COMMAND_SECONDS)
    return process.returncode, out, err


def children(pid: int) -> dict[int, str]:
    """The process's own children that are alive: pid → command line."""
    return {child: words for child, (parent, words) in processes().items() if parent == pid}


def kill_child(pid: int, words: str) -> int:
    """kill -9 for the child whose command line holds ``words``; returns who it was."""
    (victim,) = [child for child, line in children(pid).items() if words in line]
    os.kill(victim, signal.SIGKILL)
    return victim


def wait_for(what: str, condition: Callable[[], object], deadline: float = COMMAND_SECONDS) -> None:
    """Looks until ``condition`` holds."""
    wait_until(condition, what, deadline, pause=0.1)
