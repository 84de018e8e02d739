"""The health of a run at one moment: services, restarts, dead groups and alarms, as the console's Health page and `myxo top` show them.
Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.bus.registry import ENVIRONMENT
from shared.config.run_config import RunConfig
from shared.history.flow_history import DEAD, DROPPED, TRAINED, DeadGroup, FlowHistory
from shared.live.alarms import Alarm, Symptoms, alarms
from shared.live.live_services import newest_gauges
from shared.live.room import Room
from shared.live.service_failures import RESTARTED
from shared.live.shown_status import shown
from shared.live.text import shortened_line
from shared.runtime.errors import Fault
from shared.schema.service_messages import ServiceEvent, ServiceStatus

LATELY_S = 600.0
"""Restarts, deaths and drops of this time raise alarms."""

EVENTS_SHOWN = 60
STALE = "stale"
"""Why a group is dropped for its age (`services.buffer.policy`)."""


@dataclass(frozen=True)
class ServiceHealth:
    """A service that is there, or was restarted or failed since the run began. ``state``: empty where it is not there; ``error``: its
    newest, of this life or of the one before."""

    service: str
    instance: str
    state: str
    detail: str
    version: int
    restarts: int
    error: str
    held_back: str


@dataclass(frozen=True)
class DeadReason:
    """Groups that died for one reason. ``newest``: the last of them, which died at ``at`` (seconds since the epoch). ``fault``: what was at
    fault there, if it was told."""

    reason: str
    count: int
    newest: str
    at: float
    fault: Fault = ""


@dataclass(frozen=True)
class EventLine:
    """Something that a service told at ``at`` (seconds since the epoch)."""

    at: float
    instance: str
    what: str
    detail: str


@dataclass(frozen=True)
class HealthView:
    """The health. ``dead``: groups since the run began, None where nobody tells; ``reasons``: of those that are remembered, the most
    frequent first. ``events``: what services told, the newest first. ``waiting_for``: what the next training step waits for."""

    alarms: list[Alarm]
    services: list[ServiceHealth]
    dead: int | None
    reasons: list[DeadReason]
    events: list[EventLine]
    disk: Room | None
    memory: Room | None
    waiting_for: str = ""


def symptoms(
    history: FlowHistory,
    statuses: Sequence[ServiceStatus],
    now: float,
    away: Mapping[str, str],
    disk: Room | None,
    memory: Room | None,
) -> Symptoms:
    """Returns what alarms are judged by at ``now`` (seconds since the epoch)."""
    window = (now - LATELY_S, now)
    restarts: dict[str, tuple[int, str]] = {}
    for event in history.events:
        if event.what == RESTARTED and event.at >= window[0]:
            restarts[event.instance] = restarts.get(event.instance, (0, ""))[0] + 1, event.detail
    dropped = history.per_minute(DROPPED, window)
    ended = dropped + history.per_minute(TRAINED, window) + history.per_minute(DEAD, window)
    stale = history.dropped[STALE] / history.dropped.total() if history.dropped else 0.0
    return Symptoms(
        steps=list(history.steps),
        metrics=history.metrics,
        push_seconds=[push.seconds for push in history.pushes if not push.failure],
        statuses=[status for status in statuses if status.service != ENVIRONMENT],
        restarts=restarts,
        dead=[group for group in history.dead if group.at >= window[0]],
        stale_share=dropped * stale / ended if ended else 0.0,
        away=away,
        disk=disk,
        memory=memory,
    )


def health_view(
    history: FlowHistory, config: RunConfig, statuses: Sequence[ServiceStatus], found: Symptoms, waiting_for: str = ""
) -> HealthView:
    """Returns the health, by these symptoms. ``waiting_for``: what the next training step waits for, in words."""
    statuses = [shown(status) for status in statuses]
    dead = newest_gauges(statuses, "buffer").get("dead")
    return HealthView(
        alarms=alarms(found, config),
        services=services_of(history, statuses),
        dead=int(dead) if dead is not None else None,
        reasons=reasons_of(history.dead),
        events=[_line(event) for event in list(history.events)[: -EVENTS_SHOWN - 1 : -1]],
        disk=found.disk,
        memory=found.memory,
        waiting_for=waiting_for,
    )


def services_of(history: FlowHistory, statuses: Sequence[ServiceStatus]) -> list[ServiceHealth]:
    """Returns the services that are there, and those that failed or were restarted and are not."""
    failures, found = history.failures, []
    for status in sorted(statuses, key=lambda status: (status.service, status.instance)):
        error = status.last_error or failures.errors.get(status.instance, "")
        own = (status.state, status.detail, status.version, failures.restarts[status.instance], shortened_line(error), status.held_back)
        found.append(ServiceHealth(status.service, status.instance, *own))
    there = {status.instance for status in statuses}
    for instance in sorted((failures.errors.keys() | failures.restarts.keys()) - there):
        error = shortened_line(failures.errors.get(instance, ""))
        kind = next((event.service for event in reversed(history.events) if event.instance == instance), "")
        found.append(ServiceHealth(kind, shortened_line(instance), "", "", -1, failures.restarts[instance], error, ""))
    return found


def reasons_of(dead: Sequence[DeadGroup]) -> list[DeadReason]:
    """Returns why groups died, the most frequent reason first."""
    counts, newest = Counter(group.reason for group in dead), {group.reason: group for group in dead}
    return [
        DeadReason(shortened_line(reason), count, newest[reason].group, newest[reason].at, newest[reason].fault)
        for reason, count in counts.most_common()
    ]


def _line(event: ServiceEvent) -> EventLine:
    at = event.at if math.isfinite(event.at) else 0.0
    return EventLine(at, *(shortened_line(text) for text in (event.instance, event.what, event.detail)))
