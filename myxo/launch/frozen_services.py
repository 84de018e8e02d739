"""Notices services of a launch that are frozen: those without a heartbeat, and those whose own process a signal has stopped."""

import time
from collections.abc import Iterable, Sequence

from myxo.launch.supervisor import Supervisor
from shared.process import child_process
from shared.process.child_process import STOPPED_STATE
from shared.schema.service_messages import ServiceStatus
from shared.view.live_services import Heartbeats, present


class FrozenServices:
    """The heartbeats of the services that one supervisor has started.

    Args:
        timeout_s: the seconds after which a frozen one is killed, and started again; 0: never.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heartbeats = Heartbeats()
        self._stopped_since: dict[int, float] = {}

    def silent(self, patience_s: float, instances: Iterable[str]) -> dict[str, float]:
        """Returns which of these have been silent for longer, each with when it was last heard, seconds since the epoch."""
        return self._heartbeats.silent(patience_s, instances)

    def look_away(self) -> None:
        """Notes that nobody can be heard at the moment."""
        self._heartbeats.look_away()

    def listen(self, supervisor: Supervisor, statuses: Sequence[ServiceStatus]) -> None:
        """Takes the heartbeats that the registry holds, and kills what has been frozen for too long."""
        now = time.monotonic()
        instances = supervisor.statuses(now)
        self._heartbeats.look(present(statuses, instances), now, time.time())
        for item in instances:
            if item.due_in is not None:
                self._heartbeats.forget(item.instance)
        if not self._timeout_s:
            return
        silent = self._heartbeats.silent(self._timeout_s, [item.instance for item in instances])
        stopped = self._stopped({item.pid for item in instances if item.due_in is None}, now)
        for item in instances:
            if item.instance in silent:
                self._kill(supervisor, item.instance, "without a heartbeat")
            elif item.pid in stopped:  # one that a child of its own speaks for, as torchrun's process
                self._kill(supervisor, item.instance, "stopped by a signal")

    def _kill(self, supervisor: Supervisor, instance: str, how: str) -> None:
        self._heartbeats.forget(instance)
        supervisor.kill_frozen(instance, f"it was frozen, {how} for {self._timeout_s:g} s, and was killed")

    def _stopped(self, pids: set[int], now: float) -> set[int]:
        """Returns the processes that a signal has stopped for too long."""
        there = {process.pid for process in child_process.seen(pids) if process.state == STOPPED_STATE}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in there}
        return {pid for pid, since in self._stopped_since.items() if now - since >= self._timeout_s}
