"""Tells what a launched run waits for: every wait out of the ordinary once in the launcher's log and as an event, and the one of the
moment in the registry, where the other displays find the launcher's words."""

import os
import time
from typing import Any

import structlog

from shared.bus.registry import LAUNCHER
from shared.runtime.addresses import own_address
from shared.runtime.safe_text import duration
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.view.run_view import WENT_ON
from shared.view.stall import TROUBLES, Cause, RunSituation, Stall, StallWatch, telling, watched_stall

TOLD_AFTER_S = 15.0
"""Seconds after which a wait is logged that is no trouble by itself."""

LONG_STEP_S = 300.0
"""Seconds after which this holds for a step that the trainer trains."""


class WaitReport:
    """The waits of one launch.

    Attributes:
        events: of waits that have ended; whoever publishes one takes it out. newest: the wait of the moment; None before the first look.
    """

    def __init__(self) -> None:
        self.events: list[ServiceEvent] = []
        self.newest: Stall | None = None
        self._watch = StallWatch()
        self._logged: Stall | None = None
        self._told_still = 0.0  # since when there was no step as something was last told
        self._log: Any = structlog.get_logger()

    def see(self, situation: RunSituation, now: float) -> Stall:
        """Takes the situation at ``now`` (seconds since the epoch), and returns what the run waits for."""
        found = watched_stall(self._watch, situation, now)
        if self._logged is not None and self._logged.key != found.key:
            self._went_on(self._logged, now)
            self._logged = None
        if self._logged is None and self._worth_telling(found, now):
            self._logged, self._told_still = found, found.still_since
            level = self._log.warning if found.cause in TROUBLES else self._log.info
            level("run_waits", waiting_for=found.words(now), cause=found.cause.value)
        self.newest = found
        return found

    def _worth_telling(self, found: Stall, now: float) -> bool:
        """Of waits that follow each other without a step between them, none of which lasts, the first is told that comes late."""
        limit = LONG_STEP_S if found.cause is Cause.TRAINING else TOLD_AFTER_S
        still = found.still(now) if found.still_since > self._told_still else 0.0
        return found.cause in TROUBLES or max(found.lasted(now), still) >= limit

    def _went_on(self, wait: Stall, now: float) -> None:
        self._log.info("run_goes_on", waited_for=wait.awaited, seconds=round(wait.lasted(now), 1))
        words = f"{duration(wait.lasted(now))} for {wait.awaited}"
        self.events.append(ServiceEvent(service=LAUNCHER, instance=LAUNCHER, what=WENT_ON, detail=words, at=now))

    def status(self) -> ServiceStatus:
        """Returns what the registry holds of the launcher."""
        newest = self.newest or Stall(Cause.STARTING, "services to start")
        return ServiceStatus(
            service=LAUNCHER,
            instance=LAUNCHER,
            host=own_address(),
            pid=os.getpid(),
            http="",
            state=newest.cause.name,
            doing=[telling(newest)],
            at=time.time(),
        )
