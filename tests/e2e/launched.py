"""A run under ``myxo up``, seen from outside: its processes, its ledger, its end."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from myxo.run.run_directory import RunDirectory
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.process.child_process import with_parent
from shared.runtime.errors import DeadlineExceeded
from shared.schema.service_messages import ServiceStatus
from tests.support.service_process import processes

ROOT = Path(__file__).resolve().parents[2]


class LaunchedRun:
    """``myxo up CONFIG flags…`` as a process; use as a context manager, it is killed at the end of the body.

    Args:
        config: the TOML file. root: the run's directory. run: its id.
    """

    def __init__(self, config: Path, root: Path, run: str, flags: Sequence[str] = (), command: str = "up") -> None:
        self.root, self.run = root, run
        self.directory = RunDirectory(root)
        self._command = [sys.executable, "-m", "myxo.main", command, str(config), *flags]
        root.parent.mkdir(parents=True, exist_ok=True)
        self.output = root.parent / f"{run}.out"

    def __enter__(self) -> "LaunchedRun":
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(with_parent(self._command), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def said(self) -> str:
        """All that the launcher printed, and the last lines of each service: for a failed assertion."""
        parts = [self.output.read_text(errors="replace")[-4000:]]
        for log in sorted(self.root.glob("logs/*.log")):
            parts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}")
        return "\n".join(parts)

    def wait(self, deadline: float) -> int:
        """The launcher's exit code."""
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {deadline:g} s\n{self.said()}") from None

    def ended(self, steps: int, deadline: float) -> dict[str, Any]:
        """Waits for the run's good end, after so many steps, and returns its summary, in which the audit finds nothing."""
        assert self.wait(deadline) == 0, self.said()
        summary = self.summary()
        assert (summary["audit"], summary["steps"]) == ("ok", steps)
        return summary

    def until(self, what: str, condition: Callable[[list[ServiceStatus]], bool], deadline: float) -> list[ServiceStatus]:
        """Waits until the registry's cards satisfy ``condition``."""
        return asyncio.run(self._until(what, condition, deadline))

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def child(self, program: str) -> int:
        """The pid of the launcher's child whose command line names ``program``."""
        return self._child_of(self.process.pid, program)

    def descendant(self, program: str) -> int:
        """The pid of the process under the launcher whose command line names ``program``, at any depth; of several the innermost."""
        below, found = {self.process.pid}, -1
        for pid, (parent, words) in processes().items():
            if parent in below:
                below.add(pid)
                found = pid if program in words else found
        assert found >= 0, f"the launcher has no process {program} below it\n{self.said()}"
        return found

    def engine_of(self, service: int) -> int:
        """The pid of the child of a rollout service that is its engine."""
        return self._child_of(service, "launcher")

    def _child_of(self, parent: int, program: str) -> int:
        found = next((pid for pid, (of, words) in processes().items() if of == parent and program in words), -1)
        assert found >= 0, f"process {parent} has no child {program}\n{self.said()}"
        return found

    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.root / "summary.json").read_text())
        return content

    async def _until(self, what: str, condition: Callable[[list[ServiceStatus]], bool], deadline: float) -> list[ServiceStatus]:
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the launcher ended with {self.process.returncode} before {what}\n{self.said()}")
            servers = self.directory.servers()
            if servers is None:
                await asyncio.sleep(0.2)
                continue
            with contextlib.suppress(DeadlineExceeded):  # of a server that has just died: its next life is asked
                bus = await Bus.connect(servers.nats_url, "test", deadline=30)
                try:
                    registry = Registry(bus, self.run)
                    while time.monotonic() < end and self.process.poll() is None:
                        cards = await registry.alive()
                        if condition(cards):
                            return cards
                        await asyncio.sleep(0.2)
                finally:
                    await bus.close()
        raise AssertionError(f"{what} did not come within {deadline:g} s\n{self.said()}")


def gauge(cards: list[ServiceStatus], service: str, name: str) -> float:
    """A live figure of the (first) service of a kind; -1 where there is none yet."""
    for card in cards:
        if card.service == service and name in card.gauges:
            return card.gauges[name]
    return -1.0


def trained(cards: list[ServiceStatus]) -> float:
    return gauge(cards, "buffer", "trained_steps")
