"""The failures and restarts that services and launcher have published, and a check for a full disk."""

import shutil
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from nats.js.errors import NotFoundError

from shared.bus import streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.live.run_view import LATELY_SECONDS, RunView, ServiceError
from shared.runtime.errors import BadMessage
from shared.schema.service_messages import ServiceEvent

FAILED, RESTARTED = "failed", "restarted"
"""The events of a service that ends by an error, and of the launcher that started one again."""

WENT_ON = "went_on"
"""The launcher's event that the run goes on after a wait out of the ordinary; its detail says for how long, and for what."""

MOST_WAITS = 20
"""The newest waits that are kept."""

FULL_BYTES = 32 << 20
"""A disk with less room than this counts as full."""


@dataclass
class ServiceFailures:
    """The restarts of each service, the last error of each service that failed or was restarted, and what the run has waited for."""

    restarts: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)

    def take(self, event: ServiceEvent) -> None:
        """Takes an event, in the order of the stream: the launcher's event that it started a service again comes after the service's own
        that it failed, and says more."""
        if event.what == RESTARTED:
            self.restarts[event.instance] += 1
        if event.what == WENT_ON:
            self.waits = [*self.waits, event.detail][-MOST_WAITS:]
        if event.what in (FAILED, RESTARTED) and event.detail:
            self.errors[event.instance] = event.detail


async def read_failures(bus: Bus, run: str) -> ServiceFailures:
    """Reads the events since the run began."""
    found, names = ServiceFailures(), Subjects(run)
    async for _, event in streams.read(bus, names.events_stream, ServiceEvent, names.event("service", "*"), strict=False):
        found.take(event)
    return found


async def with_all_failures(bus: Bus, view: RunView) -> RunView:
    """Returns the view with all failures and restarts since the run began."""
    failures = await read_failures(bus, view.run)
    known = {error.instance: error for error in view.troubles.errors}
    for instance in failures.errors | failures.restarts:
        known[instance] = ServiceError(instance, failures.restarts[instance], failures.errors.get(instance, ""))
    return _with_errors(view, *known.values())


async def with_newest_failures(bus: Bus, view: RunView) -> RunView:
    """Returns the view with the newest failure and the newest restart that were published lately: the status of one that died is gone with
    it, and one that was killed has told nothing itself."""
    known = {error.instance: error for error in view.troubles.errors}
    for what in (RESTARTED, FAILED):
        event = await _newest(bus, view.run, what)
        if event is not None and event.instance not in known and time.time() - event.at <= LATELY_SECONDS:
            reason = f"{RESTARTED} {event.detail}".rstrip() if what == RESTARTED else event.detail
            known[event.instance] = ServiceError(event.instance, 0, reason)
    return _with_errors(view, *known.values())


async def _newest(bus: Bus, run: str, what: str) -> ServiceEvent | None:
    names = Subjects(run)
    try:
        last = await bus.js.get_last_msg(names.events_stream, names.event("service", what))
        return None if last.data is None else ServiceEvent.decode(last.data)
    except (NotFoundError, BadMessage):
        return None


def _with_errors(view: RunView, *errors: ServiceError) -> RunView:
    return replace(view, troubles=replace(view.troubles, errors=errors))


def full_disk(root: Path) -> str:
    """Returns a line about the disk that ``root`` lies on where that is full, else nothing."""
    free = shutil.disk_usage(root).free
    return f"No space left on device: {free >> 20} MB are free at {root}" if free < FULL_BYTES else ""
