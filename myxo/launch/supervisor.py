"""Keeps the services of a run alive: starts them, restarts what dies, and says when there is no use in that.

Works in ticks, each of which only looks and acts and never waits, so that the launcher goes on watching everything else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from myxo.launch.backoff import BackOff
from myxo.launch.repeated_deaths import SameDeaths, from_outside
from myxo.launch.service_plan import ServiceSpec
from shared.runtime import exit_codes, failure_summary
from shared.runtime.child_process import ChildProcess, cause
from shared.runtime.errors import MyxoError
from shared.schema.messages import ServiceStatus

LAST_LINES = 15
"""Lines of a log that are shown when a service is given up."""

REASON_LINES = 500
"""Lines of a log that are searched for what a service died of."""

AT_WORK = ("ready", "fenced", "updating", "standby")
"""States of a card that mean the service has got to work (a rollout that waits for weights is fenced, a second buffer stands by)."""


@dataclass(frozen=True)
class StopReason:
    """Why the run cannot go on. ``lines``: the service's last words; ``error``: what it died of each time, where that was the same."""

    instance: str
    bad_input: bool
    deaths: int
    lines: list[str]
    log_path: Path
    error: str = ""

    @property
    def reason(self) -> str:
        """In one line."""
        if self.error:
            return f"{self.instance} ended {self.deaths} times with the same error, and no training step in between: {self.error}"
        return f"{self.instance} ended {self.deaths} times in a row without getting to work"


@dataclass(frozen=True)
class InstanceStatus:
    """One service as the launcher knows it.

    ``lived``: seconds; ``started_at``: seconds since the epoch; ``due_in``: seconds to its next start, None while it runs;
    ``last_error``: what the life before ended with.
    """

    service: str
    instance: str
    pid: int
    restarts: int
    ready: bool
    lived: float
    started_at: float
    due_in: float | None
    last_code: int | None
    last_error: str = ""


@dataclass
class SupervisedService:
    """A place that is always to be filled: the spec, who fills it now, and what happened to those before."""

    spec: ServiceSpec
    child: ChildProcess
    backoff: BackOff = field(default_factory=BackOff)
    ready: bool = False
    restarts: int = 0
    due: float | None = None
    last_code: int | None = None
    last_error: str = ""
    same: SameDeaths = field(default_factory=SameDeaths)


class Supervisor:
    """The services of one run.

    Args:
        logs: instance → its log file.
        excused: (since, `time.monotonic` seconds) → whether bus or store were away since then. An exit with code 2 is then a
            death like any other, for an unreachable server is bad input only where it never answered.
        on_restart: called with the instance and what ended its life before, when it has been started again.
        backoff: makes each service's back-off.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        logs: Callable[[str], Path],
        *,
        excused: Callable[[float], bool] = lambda since: False,
        on_restart: Callable[[ServiceSpec, str], None] = lambda spec, why: None,
        backoff: Callable[[], BackOff] = BackOff,
    ) -> None:
        self._excused, self._on_restart, self._logs = excused, on_restart, logs
        self._posts = [SupervisedService(spec, _started(spec, logs(spec.instance)), backoff()) for spec in specs]
        self._log = structlog.get_logger()
        for post in self._posts:
            self._log.info("service_started", started=post.spec.instance, pid=post.child.pid)

    def tick(self, now: float, steps: int = 0) -> StopReason | None:
        """Looks after everybody once. Returns a verdict when the run has to stop. ``steps``: training steps finished until now."""
        for post in self._posts:
            if post.due is None:
                code = post.child.exit_code()
                if code is None:
                    continue
                verdict = self._died(post, code, now, steps)
                if verdict is not None:
                    return verdict
            if post.due is not None and now >= post.due:
                self._restart(post)
        return None

    def see(self, cards: Sequence[ServiceStatus]) -> None:
        """Takes note of who says that it is ready."""
        for card in cards:
            for post in self._posts:
                # a card of the life before lingers for its TTL; the pid says nothing, for a service may work in a child of its own
                own = (card.service, card.instance) == (post.spec.service, post.spec.instance)
                if own and card.at > post.child.started_at and card.state in AT_WORK:
                    post.ready = True

    def statuses(self, now: float) -> list[InstanceStatus]:
        """Everybody, in the order of the specs."""
        return [
            InstanceStatus(
                service=post.spec.service,
                instance=post.spec.instance,
                pid=post.child.pid,
                restarts=post.restarts,
                ready=post.ready and post.due is None,
                lived=now - post.child.started_s,
                started_at=post.child.started_at,
                due_in=None if post.due is None else max(0.0, post.due - now),
                last_code=post.last_code,
                last_error=post.last_error,
            )
            for post in self._posts
        ]

    def restarts(self) -> dict[str, int]:
        """How often each instance was started again."""
        return {post.spec.instance: post.restarts for post in self._posts}

    def running(self, service: str | None = None) -> bool:
        """Whether any process (of that kind of service) still runs."""
        posts = [post for post in self._posts if service in (None, post.spec.service)]
        return any(post.child.exit_code() is None for post in posts)

    def terminate(self, service: str | None = None) -> None:
        """Asks everybody (of that kind of service) to stop; nobody is started again unless `tick` is called."""
        for post in self._posts:
            if service in (None, post.spec.service):
                post.child.terminate()

    def kill(self) -> list[str]:
        """Ends whoever still runs, with all it started. Returns their instances."""
        left = [post for post in self._posts if post.child.exit_code() is None]
        for post in left:
            with contextlib.suppress(MyxoError):  # one that the kernel does not let go is left to it
                post.child.stop(0)
        return [post.spec.instance for post in left]

    def _died(self, post: SupervisedService, code: int, now: float, steps: int) -> StopReason | None:
        child, instance, excused = post.child, post.spec.instance, self._excused(post.child.started_s)
        post.last_code = code
        if code == exit_codes.BAD_INPUT and not excused:
            self._log.error("bad_input", of=instance)
            return StopReason(instance, True, 1, child.last_lines(1), self._logs(instance))
        said = "" if from_outside(code) or code == 0 else failure_summary.of_log(child.last_lines(REASON_LINES))
        post.last_error = f"{cause(code)}: {said}" if said else cause(code)
        wait = post.backoff.died(now - child.started_s, post.ready)
        self._log.warning("service_died", died=instance, reason=post.last_error, lived=round(now - child.started_s, 1), restart_in=wait)
        if not excused and post.same.died(code, said, steps):
            return StopReason(instance, False, post.same.count, child.last_lines(LAST_LINES), self._logs(instance), post.last_error)
        if wait is None:
            return StopReason(instance, False, post.backoff.deaths_unready, child.last_lines(LAST_LINES), self._logs(instance))
        post.due = now + wait
        return None

    def _restart(self, post: SupervisedService) -> None:
        post.child = _started(post.spec, self._logs(post.spec.instance))
        post.ready = False
        post.due = None
        post.restarts += 1
        self._log.info("service_restarted", started=post.spec.instance, pid=post.child.pid, restarts=post.restarts)
        self._on_restart(post.spec, post.last_error)


def _started(spec: ServiceSpec, log_path: Path) -> ChildProcess:
    return ChildProcess(spec.instance, spec.command, log_path, {**os.environ, **spec.environment})
