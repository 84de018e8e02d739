"""Keeps the services of a run alive: starts them, restarts those that die, and reports when one has to be given up.

It works in ticks, none of which waits, so that the launcher goes on watching everything else.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from myxo.launch.restart_policy import MOST_SAME, BackOff, SameDeaths, from_outside
from myxo.launch.service_plan import TRAINERS, ServiceSpec
from shared.process.child_process import ChildProcess, cause
from shared.process.parent_watchdog import kill_descendants
from shared.runtime import exit_codes, failure_summary
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.view.live_services import InstanceStatus
from shared.view.run_view import RESTARTED

LAST_LINES = 15
"""Lines of a log that are shown when a service is given up."""

REASON_LINES = 500
"""Lines of a log that are searched for the error that a service died of."""

AT_WORK = ("ready", "fenced", "updating", "standby")
"""States in which a service is at work (a rollout that waits for weights is fenced, a second buffer stands by)."""


@dataclass(frozen=True)
class StopReason:
    """The reason for ending the run. ``lines``: the service's last lines; ``error``: that of the last death, ``same``: of each of them."""

    instance: str
    bad_input: bool
    deaths: int
    lines: list[str]
    log_path: Path
    error: str = ""
    same: bool = False

    @property
    def reason(self) -> str:
        """Returns the reason in one line."""
        if self.error:
            how = "with the same error, and no training step in between" if self.same else "and no training step in between, at last with"
            return f"{self.instance} ended {self.deaths} times {how}: {self.error}"
        return f"{self.instance} ended {self.deaths} times in a row without getting to work"


@dataclass
class SupervisedService:
    """A service that is always to run: its process now, and what happened to the ones before. ``due``: when the next one starts, monotonic
    seconds, None while one runs."""

    spec: ServiceSpec
    child: ChildProcess
    backoff: BackOff = field(default_factory=BackOff)
    ready: bool = False
    restarts: int = 0
    due: float | None = None
    last_code: int | None = None
    last_error: str = ""
    ended_at: float = 0.0
    killed_for: str = ""
    same: SameDeaths = field(default_factory=SameDeaths)

    @property
    def left(self) -> bool:
        """Returns whether it is a trainer that has ended in order."""
        return self.spec.service in TRAINERS and self.child.exit_code() == 0

    def status(self, now: float) -> InstanceStatus:
        """Returns the launcher's view of it at ``now``, monotonic seconds."""
        ready, lived = self.ready and self.due is None, now - self.child.started_s
        due_in = None if self.due is None else max(0.0, self.due - now)
        life = (self.child.pid, self.restarts, ready, lived, self.child.started_at)
        told = (self.last_code, self.last_error, self.spec.foreign, self.ended_at)
        return InstanceStatus(self.spec.service, self.spec.instance, *life, due_in, *told)


class Supervisor:
    """The services of one run.

    Args:
        logs: instance → its log file.
        excused: (since, `time.monotonic` seconds) → whether bus or store were away since then. An exit with code 2 is then a
            death like any other, for an unreachable server is bad input only where it never answered.
        backoff: makes each service's back-off.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        logs: Callable[[str], Path],
        *,
        excused: Callable[[float], bool] = lambda since: False,
        backoff: Callable[[], BackOff] = BackOff,
    ) -> None:
        self.restarted: list[ServiceEvent] = []
        """Of each service that was started again, with the error that ended its life before; whoever publishes an event takes it out."""
        self._excused, self._logs = excused, logs
        self._services = [SupervisedService(spec, _started(spec, logs(spec.instance)), backoff()) for spec in specs]
        self._log = structlog.get_logger()
        for service in self._services:
            self._log.info("service_started", started=service.spec.instance, pid=service.child.pid)

    def tick(self, now: float, steps: int = 0, hold: bool = False, finished: bool = False) -> StopReason | None:
        """Checks all services once. Returns the reason where the run has to stop.

        Args:
            steps: training steps finished until now. hold: start none again now. finished: a trainer that ends in order has nothing more to
                do, and is not started again.
        """
        for service in self._services:
            if finished and service.left:
                continue
            if service.due is None:
                code = service.child.exit_code()
                if code is None:
                    continue
                reason = self._died(service, code, now, steps)
                if reason is not None:
                    return reason
            if service.due is not None and now >= service.due and not hold:
                self._restart(service)
        return None

    def note_ready(self, statuses: Sequence[ServiceStatus]) -> None:
        """Notes the services that report that they are at work."""
        newest = {(status.service, status.instance): status for status in statuses}
        for service in self._services:
            status = newest.get((service.spec.service, service.spec.instance))
            # a status of the process before remains for its TTL; the pid does not tell, for a service may work in a child of its own
            if status is not None and status.at > service.child.started_at and status.state in AT_WORK:
                service.ready = True

    def statuses(self, now: float) -> list[InstanceStatus]:
        """Returns the statuses of all services, in the order of the specs."""
        return [service.status(now) for service in self._services]

    def running(self, kind: str | None = None) -> bool:
        """Returns whether any process (of that kind of service) still runs."""
        return any(service.child.running() for service in self._services if kind in (None, service.spec.service))

    def trainers_left(self) -> bool:
        """Returns whether every trainer has ended in order."""
        return all(service.left for service in self._services if service.spec.service in TRAINERS)

    def terminate(self, kind: str | None = None) -> None:
        """Asks every service (of that kind) to stop; none is started again unless `tick` is called."""
        for service in self._services:
            if kind in (None, service.spec.service):
                service.child.terminate()

    def kill(self) -> list[str]:
        """Ends the services that still run, with all they started. Returns their instances."""
        left = [service for service in self._services if service.child.running()]
        for service in left:
            with contextlib.suppress(MyxoError):  # a process that the kernel cannot kill yet is left to it
                service.child.stop(0)
        return [service.spec.instance for service in left]

    def kill_frozen(self, instance: str, reason: str) -> None:
        """Kills a service that no longer lives although its process does, with all that it started; `tick` starts it again.

        Args:
            reason: why, as its last error.
        """
        for service in self._services:
            if service.spec.instance == instance and service.due is None and service.child.running():
                service.killed_for = reason
                self._log.error("service_frozen", frozen=instance, pid=service.child.pid, error=reason)
                kill_descendants(service.child.pid)
                service.child.kill()

    def _died(self, service: SupervisedService, code: int, now: float, steps: int) -> StopReason | None:
        child, instance, excused = service.child, service.spec.instance, self._excused(service.child.started_s)
        service.last_code, service.ended_at = code, time.time()
        if code == exit_codes.BAD_INPUT and not excused:
            self._log.error("bad_input", of=instance)
            return StopReason(instance, True, 1, child.last_lines(1), self._logs(instance))
        words = "" if from_outside(code) or code == 0 else failure_summary.of_log(child.last_lines(REASON_LINES))
        service.last_error = service.killed_for or (f"{cause(code)}: {words}" if words else cause(code))
        service.killed_for = ""
        lived = now - child.started_s
        wait = service.backoff.died(lived, service.ready or (service.spec.foreign and lived >= service.backoff.healthy))
        self._log.warning("service_died", died=instance, reason=service.last_error, lived=round(lived, 1), restart_in=wait)
        if not excused and service.same.died(code, words, steps):
            same = service.same.count >= MOST_SAME
            deaths = service.same.count if same else service.same.deaths
            return StopReason(instance, False, deaths, child.last_lines(LAST_LINES), self._logs(instance), service.last_error, same)
        if wait is None:
            return StopReason(instance, False, service.backoff.deaths_unready, child.last_lines(LAST_LINES), self._logs(instance))
        service.due = now + wait
        return None

    def _restart(self, service: SupervisedService) -> None:
        service.child = _started(service.spec, self._logs(service.spec.instance))
        service.ready = False
        service.due = None
        service.restarts += 1
        self._log.info("service_restarted", started=service.spec.instance, pid=service.child.pid, restarts=service.restarts)
        kind, instance, detail = service.spec.service, service.spec.instance, f"after {service.last_error}"
        self.restarted.append(ServiceEvent(service=kind, instance=instance, what=RESTARTED, detail=detail, at=service.child.started_at))


def _started(spec: ServiceSpec, log_path: Path) -> ChildProcess:
    return ChildProcess(spec.instance, spec.command, log_path, {**os.environ, **spec.environment}, watchdog=spec.foreign)
