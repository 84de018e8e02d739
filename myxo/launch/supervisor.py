"""Keeps the services of a run alive: starts them, restarts those that die or freeze, and reports when one has to be given up.

It works in ticks, none of which waits, so that the launcher continues watching everything else. A service that never becomes ready is given
up by `BackOff`; one that becomes ready and dies all the same, while the run gets no further, by `SameDeaths`.
"""

import contextlib
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from myxo.launch.service_plan import TRAINERS, ServiceSpec
from shared.bus.registry import NODE
from shared.config.service_sections import BusSection
from shared.process import child_process as process_watch
from shared.process.child_process import STOPPED_STATE, ChildProcess, cause
from shared.process.parent_watchdog import kill_descendants
from shared.runtime import exit_codes, failure_summary
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.view.live_services import Heartbeats, InstanceStatus, count, present
from shared.view.run_view import RESTARTED


@dataclass
class BackOff:
    """The waits of one process before its restarts."""

    first: float = 0.5
    longest: float = 30.0  # Seconds of the first wait, and of the longest; each wait is twice the one before
    healthy: float = 60.0  # uptime after which earlier deaths no longer count: the next wait is the first one again
    most: int = 10  # number of deaths in a row, without having been ready, after which the process is given up
    at_once: bool = False  # true if there is no wait after the first death of a row (for servers, which all services need)
    short_lives: int = 0
    deaths_unready: int = 0  # deaths in a row until now: after a short life, and without having been ready

    def died(self, lived: float, ready: bool) -> float | None:
        """Notes a death after ``lived`` seconds; ``ready``: whether it had become ready before.

        Returns the seconds to wait before the next start; None when it should not be started any more.
        """
        self.deaths_unready = 0 if ready else self.deaths_unready + 1
        if self.deaths_unready >= self.most:
            return None
        self.short_lives = 1 if lived >= self.healthy else self.short_lives + 1
        doublings = self.short_lives - 1 - self.at_once
        return 0.0 if doublings < 0 else min(self.longest, self.first * 2.0 ** min(doublings, 64))


@dataclass
class KeptAlive:
    """A process that is always to run, over all its lives.

    ``kind``, ``name``: its own, in events. ``due``: when its next life starts, monotonic seconds; None while one runs, and once it is given
    up. ``error``: what ended the newest life that has ended, at ``ended_at``, seconds since the epoch.
    """

    kind: str
    name: str
    backoff: BackOff = field(default_factory=BackOff)
    restarts: int = 0
    due: float | None = None
    error: str = ""
    ended_at: float = 0.0

    def note_death(self, now: float, lived: float, ready: bool, error: str) -> bool:
        """Sets when it is started again. Returns False where it is given up."""
        wait = self.backoff.died(lived, ready)
        self.due, self.error, self.ended_at = None if wait is None else now + wait, error, time.time()
        structlog.get_logger().warning("service_died", died=self.name, reason=error, lived=round(lived, 1), restart_in=wait)
        return wait is not None

    def note_restart(self) -> ServiceEvent:
        """Counts a further life, which has begun. Returns the event that reports it."""
        self.due, self.restarts = None, self.restarts + 1
        structlog.get_logger().info("service_restarted", started=self.name, restarts=self.restarts)
        return ServiceEvent(service=self.kind, instance=self.name, what=RESTARTED, detail=f"after {self.error}", at=time.time())


MOST_SAME = 3  # number of deaths of one service by one error, without a finished training step in between, after which it is given up

# The number of its deaths by anything: errors that take turns, and kills from outside, for the kernel kills what takes too much memory.
MOST_DEATHS = 10

# Signals that a process causes itself; all others come from outside.
_OWN_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}

# Matches the log of a service whose own child process was killed from outside.
_KILLED = re.compile(r"exit ?code: -(9|15)\b|signal (9|15)\b|SIGKILL|SIGTERM")


def from_outside(code: int) -> bool:
    """Returns whether a process with this exit code was killed from outside: its last log lines then do not say why."""
    return code == exit_codes.STOPPED or (code < 0 and -code not in _OWN_SIGNALS)


@dataclass
class SameDeaths:
    """Counts the deaths of one service since a training step was last finished.

    ``deaths``: all of them. ``count``: those of the newest one's kind; 0 where that was a kill from outside.
    """

    deaths: int = 0
    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    steps: int = 0

    def died(self, code: int, reason: str, steps: int) -> bool:
        """Notes a death; returns whether the service should be given up.

        ``code``: its exit code, negative for a signal. ``reason``: its last error. ``steps``: training steps finished until now.
        """
        if steps > self.steps:
            self.steps, self.deaths = steps, 0
            self.kinds.clear()
        self.deaths, self.count = self.deaths + 1, 0
        if not from_outside(code) and not _KILLED.search(reason):
            kind = f"{code}: {failure_summary.kind(reason)}"
            self.kinds[kind] += 1
            self.count = self.kinds[kind]
        return self.count >= MOST_SAME or self.deaths >= MOST_DEATHS


@dataclass
class RunProgress:
    """What a run gets done, by which deaths are forgiven: training steps, or a training endpoint's answers to its clients.

    ``commands``: that the trainer's newest life was last seen to have answered. ``answers``: how often they were more than before.
    """

    commands: int = 0
    answers: int = 0

    def seen(self, steps: int, trainer: Mapping[str, float]) -> int:
        """Returns a number that has grown where the run got on. ``trainer``: gauges of its newest status."""
        before, self.commands = self.commands, count(trainer, "client_commands") - count(trainer, "client_commands_replayed")
        self.answers += self.commands > before
        return steps + self.answers


LAST_LINES = 15  # lines of a log that are shown when a service is given up
REASON_LINES = 500  # lines of a log that are searched for the error that a service died of

# States in which a service is at work (a rollout that waits for weights is fenced, a second buffer stands by).
AT_WORK = ("ready", "fenced", "updating", "standby")


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
class SupervisedService(KeptAlive):
    """A service of a run: its process now, and what happened to the ones before."""

    spec: ServiceSpec = field(kw_only=True)
    child: ChildProcess = field(kw_only=True)
    ready: bool = False
    last_code: int | None = None
    killed_for: str = ""
    same: SameDeaths = field(default_factory=SameDeaths)

    def status(self, now: float) -> InstanceStatus:
        """Returns the launcher's view of it at ``now``, monotonic seconds."""
        ready, lived = self.ready and self.due is None, now - self.child.started_s
        due_in = None if self.due is None else max(0.0, self.due - now)
        life = (self.child.pid, self.restarts, ready, lived, self.child.started_at)
        reported = (self.last_code, self.error, self.spec.foreign, self.ended_at)
        return InstanceStatus(self.spec.service, self.spec.instance, *life, due_in, *reported)


class Supervisor:
    """The services of one run.

    ``logs``: instance → its log file. ``excused``: (since, `time.monotonic` seconds) → whether bus or store were away, or full, since then.
    An exit with code 2 is then a death like any other: a server that comes back may refuse at first. ``away``: whether they were away, so
    that it is no fault of a service that it did not get to work. ``backoff``: makes each service's back-off.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        logs: Callable[[str], Path],
        *,
        excused: Callable[[float], bool] = lambda since: False,
        away: Callable[[float], bool] | None = None,
        backoff: Callable[[], BackOff] = BackOff,
    ) -> None:
        # Of each service that was started again, with the error that ended its life before; whoever publishes an event takes it out.
        self.restarted: list[ServiceEvent] = []
        self._excused, self._away, self._logs = excused, away or excused, logs
        self._services = [
            SupervisedService(spec.service, spec.instance, backoff(), spec=spec, child=_started(spec, logs(spec.instance)))
            for spec in specs
        ]
        self._log = structlog.get_logger()
        for service in self._services:
            self._log.info("service_started", started=service.spec.instance, pid=service.child.pid)

    def tick(self, now: float, steps: int = 0, hold: bool = False, finished: bool = False) -> StopReason | None:
        """Checks all services once. Returns the reason where the run has to stop.

        ``steps``: training steps finished until now. ``hold``: start none again now. ``finished``: what ends in order has nothing more
        to do, and is not started again.
        """
        for service in self._services:
            if finished and service.child.exit_code() == 0:
                continue
            if service.due is None:
                code = service.child.exit_code()
                if code is None:
                    continue
                reason = self._died(service, code, now, steps)
                if reason is not None:
                    return reason
            if service.due is not None and now >= service.due and not hold:
                service.child = _started(service.spec, self._logs(service.spec.instance))
                service.ready = False
                self.restarted.append(service.note_restart())
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
        """Returns whether every trainer, and part of one, has ended in order."""
        return all(service.child.exit_code() == 0 for service in self._services if service.spec.service in (*TRAINERS, NODE))

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

        ``reason``: why, as its last error.
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
        error, lived = service.killed_for or (f"{cause(code)}: {words}" if words else cause(code)), now - child.started_s
        service.killed_for = ""
        ready = service.ready or (service.spec.foreign and lived >= service.backoff.healthy)
        again = service.note_death(now, lived, ready or self._away(child.started_s), error)
        if not excused and service.same.died(code, words, steps):
            same = service.same.count >= MOST_SAME
            deaths = service.same.count if same else service.same.deaths
            return StopReason(instance, False, deaths, child.last_lines(LAST_LINES), self._logs(instance), error, same)
        deaths = service.backoff.deaths_unready
        return None if again else StopReason(instance, False, deaths, child.last_lines(LAST_LINES), self._logs(instance))


def _started(spec: ServiceSpec, log_path: Path) -> ChildProcess:
    return ChildProcess(spec.instance, spec.command, log_path, {**os.environ, **spec.environment}, watchdog=spec.foreign)


class Probe:
    """Asks a process whether it answers, on a thread of its own: one that is frozen is alive and says nothing.

    ``silent_s``: for how long it has not answered. A question counts for the probe's interval, however long it took: a machine that was
    suspended makes no process silent. ``answered``: whether it has, since its start.
    """

    def __init__(self, answers: Callable[[], bool], interval_s: float) -> None:
        self._answers, self._interval_s = answers, interval_s
        self._thread, self._at = threading.Thread(), 0.0
        self.begin()

    def begin(self) -> None:
        """Begins anew, for a process that is started again."""
        self.silent_s, self.answered = 0.0, False

    def tick(self, now: float) -> None:
        """Asks, where it is time to, and the last question is over. ``now``: monotonic seconds."""
        if now >= self._at and not self._thread.is_alive():
            self._at = now + self._interval_s
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()

    def _ask(self) -> None:
        if self._answers():
            self.silent_s, self.answered = 0.0, True
        else:
            self.silent_s += self._interval_s


class FrozenServices:
    """The ``heartbeats`` of the services that one supervisor has started.

    One that is frozen for ``bus.frozen_timeout`` is killed, and started again; never before its status would expire.
    """

    def __init__(self, bus: BusSection) -> None:
        self._timeout_s = bus.frozen_timeout and max(bus.frozen_timeout, bus.registry_ttl)
        self.heartbeats = Heartbeats()
        self._stopped_since: dict[int, float] = {}

    def listen(self, supervisor: Supervisor, statuses: Sequence[ServiceStatus]) -> None:
        """Takes the heartbeats that the registry holds, and kills what has been frozen for too long."""
        now = time.monotonic()
        instances = supervisor.statuses(now)
        self.heartbeats.observe(present(statuses, instances), now, time.time())
        for item in instances:
            if item.due_in is not None:
                self.heartbeats.forget(item.instance)
        if not self._timeout_s:
            return
        silent = self.heartbeats.silent(self._timeout_s, [item.instance for item in instances])
        stopped = self._stopped({item.pid for item in instances if item.due_in is None}, now)
        for item in instances:
            if item.instance in silent or item.pid in stopped:  # a child of its own speaks for a stopped one, as for torchrun's process
                how = "without a heartbeat" if item.instance in silent else "stopped by a signal"
                self.heartbeats.forget(item.instance)
                supervisor.kill_frozen(item.instance, f"it was frozen, {how} for {self._timeout_s:g} s, and was killed")

    def _stopped(self, pids: set[int], now: float) -> set[int]:
        there = {process.pid for process in process_watch.seen(pids) if process.state == STOPPED_STATE}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in there}
        return {pid for pid, since in self._stopped_since.items() if now - since >= self._timeout_s}
