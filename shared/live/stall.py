"""What a run waits for at one moment: for whom and for what, since when, and what happens next. Pure.

Displays, logs, the console and reports have their words from here. `shared.live.stall_causes` decides which wait it is.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from shared.bus.registry import ENVIRONMENT
from shared.config.run_config import RunConfig
from shared.live.live_services import InstanceStatus, newest_gauges, present, trained_steps
from shared.live.shown_status import shown
from shared.live.text import duration, shortened_line
from shared.schema.service_messages import Doing, ServiceStatus

NATS, STORE = "NATS", "Redis"
"""The servers, as displays name them."""

LONG_S = 10.0
"""Seconds after which an ordinary wait is worth a line of its own, where nothing is redrawn."""


class Cause(Enum):
    """Why a run waits; each value is how a log line names it."""

    DISK = "the disk is full"
    BUS = "the bus is away"
    STORE = "the store is away"
    FAILED = "the run has failed"
    DOWN = "a service is down"
    SILENT = "a service is silent"
    STARTING = "services start"
    ABSENT = "a kind of service is missing"
    LOADING = "a service gets ready"
    FINAL_WEIGHTS = "the final weights are written"
    ROOM = "there is no room"
    WEIGHTS = "no weights are served"
    ENVIRONMENT = "an environment is away"
    PUSH = "weights are pushed"
    TRAINING = "the trainer is at work"
    STUCK = "work does not go on"
    BATCH = "a batch is not complete"
    EVALUATION = "an evaluation is not complete"
    STEP = "a step begins"


TROUBLES = frozenset({Cause.DISK, Cause.BUS, Cause.STORE, Cause.FAILED, Cause.DOWN, Cause.SILENT, Cause.ROOM, Cause.STUCK})
"""Causes that are worth a line at once: no healthy run has them."""


@dataclass(frozen=True)
class Away:
    """Since when something is away (seconds since the epoch), why, and what happens next; empty: it is waited for."""

    since: float
    why: str
    next_action: str = ""


@dataclass(frozen=True)
class Owed:
    """What a finished run still waits for, since when (seconds since the epoch), and what happens if it does not come."""

    what: str
    since: float
    next_action: str


@dataclass(frozen=True)
class Stall:
    """A wait. ``awaited``: whom and what for, in words that follow "waiting for"; ``since``: seconds since the epoch, 0: not known.

    ``still_since``: when the run's newest step was first seen, 0: not known. One wait may follow another without a step between them.
    """

    cause: Cause
    awaited: str
    since: float = 0.0
    next_action: str = ""
    still_since: float = 0.0

    @property
    def key(self) -> tuple[Cause, str]:
        """Returns what stays the same while the wait does, but for the numbers in its words."""
        return self.cause, "".join(letter for letter in self.awaited if not letter.isdigit())

    def lasted(self, now: float) -> float:
        """Returns the seconds that it lasts, 0 where that is not known."""
        return max(0.0, now - self.since) if self.since else 0.0

    def still(self, now: float) -> float:
        """Returns the seconds since the newest step was first seen, 0 where that is not known."""
        return max(0.0, now - self.still_since) if self.still_since else 0.0

    def words(self, now: float) -> str:
        """Returns the whole sentence after "waiting for"; ``now``: seconds since the epoch."""
        since = f", for {duration(self.lasted(now))} (since {time.strftime('%H:%M:%S', time.localtime(self.since))})" if self.since else ""
        step = f", no new step for {duration(self.still(now))}" if self.lasted(now) < LONG_S <= self.still(now) else ""
        return f"{self.awaited}{since}{step}" + (f"; {self.next_action}" if self.next_action else "")

    def worth_a_line(self, now: float) -> bool:
        """Returns whether it is out of the ordinary, or one of several that have followed each other for long."""
        return self.cause in TROUBLES or max(self.lasted(now), self.still(now)) >= LONG_S


@dataclass(frozen=True)
class RunSituation:
    """What is known of a run.

    ``statuses``: of live services, those of environments aside; ``environments``: theirs. ``instances``: the launcher's own processes,
    empty elsewhere. ``away``: server → since when, and why. ``silent``: instance → since when its heartbeat is missing. ``errors``:
    instance → the error that its last life ended with. ``disk``: what to say of a full one. ``failure``: why the run has failed.
    ``told``: the wait as the launcher tells it, who knows more than others do. ``owed``: what is still missing of a finished run.
    """

    config: RunConfig
    statuses: Sequence[ServiceStatus]
    environments: Sequence[ServiceStatus] = ()
    instances: Sequence[InstanceStatus] = ()
    away: Mapping[str, Away] = field(default_factory=dict)
    silent: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    disk: str = ""
    failure: str = ""
    told: Stall | None = None
    owed: Owed | None = None

    @classmethod
    def of(
        cls, config: RunConfig, services: Sequence[ServiceStatus], instances: Sequence[InstanceStatus] = (), **known: Any
    ) -> "RunSituation":
        """Returns the situation by what the registry holds; ``known``: further fields."""
        there = [shown(status) for status in present(services, instances)]
        statuses = [status for status in there if status.service != ENVIRONMENT]
        return cls(config, statuses, [status for status in there if status.service == ENVIRONMENT], instances, **known)

    @property
    def buffer(self) -> dict[str, float]:
        """Returns the gauges of the active buffer."""
        return newest_gauges(self.statuses, "buffer")

    @property
    def steps(self) -> int:
        """Returns how many steps are trained, as far as services tell; -1 where none is ever trained or nobody tells."""
        return -1 if self.config.debug.debug_rollout_only else trained_steps(self.statuses)

    def doing(self, part: str) -> list[tuple[ServiceStatus, Doing]]:
        """Returns what that part of each service does, the oldest first."""
        found = [(status, item) for status in self.statuses for item in status.doing if item.part == part]
        return sorted(found, key=lambda entry: entry[1].since)


RUN = "run"
"""The part of the launcher that tells what the run waits for (`shared.schema.service_messages.Doing`)."""


def told_by(launcher: ServiceStatus | None) -> Stall | None:
    """Returns the wait that a launcher's status tells of."""
    doing = next((item for item in shown(launcher).doing if item.part == RUN), None) if launcher is not None else None
    if launcher is None or doing is None or launcher.state not in Cause.__members__:
        return None
    return Stall(Cause[launcher.state], doing.what, doing.since, doing.next_action)


def telling(found: Stall) -> Doing:
    """Returns the wait as the launcher's status tells it, beside the state, which is the cause's name."""
    return Doing(part=RUN, what=found.awaited, since=found.since, next_action=found.next_action)


class StallWatch:
    """Follows one wait after another: gives each that does not know its beginning the time when it was first seen, and all of them that
    of the newest step."""

    def __init__(self) -> None:
        self._key: tuple[Cause, str] | None = None
        self._since = 0.0
        self._steps, self._still_since = -1, 0.0

    def see(self, found: Stall, now: float, steps: int = -1) -> Stall:
        """Returns the wait with its beginning. ``now``: seconds since the epoch; ``steps``: trained so far, as far as known."""
        if found.key != self._key:
            self._key, self._since = found.key, now
        if steps > self._steps:
            self._steps, self._still_since = steps, now
        return replace(found, since=found.since or self._since, still_since=self._still_since)


def named(error: str) -> str:
    """Returns an error as a part of a sentence."""
    return f" ({shortened_line(error)})" if error else ""
