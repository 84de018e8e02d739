"""The run's failure: found by the count of dead groups, or told by a launcher; kept on the bus until somebody creates the run again.

While it stands the buffer admits nothing and tells the trainer to leave. Nobody restarts anything: services idle, or are stopped.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from services.buffer.dead_groups import DeadGroups
from shared.bus import runs
from shared.runtime import failure_summary
from shared.runtime.service_base import Service
from shared.schema.ledger import LedgerRecord

STATE = "run failed"
"""State of a buffer whose run has failed. The buffer itself is well."""


class RunFailure:
    """See the module's docstring.

    Args:
        limit: `max_dead_in_a_row`. held: awaited before the bus is told; raises where another buffer is active.
    """

    def __init__(self, service: Service, limit: int, held: Callable[[], Awaitable[None]]) -> None:
        self._service, self._limit, self._held = service, limit, held
        self._dead = DeadGroups()
        self.reason = ""
        """Why the run has failed; empty while it has not."""

    async def see(self, record: LedgerRecord, dead: int) -> None:
        """Takes a record that was just made; where the run is hopeless with it, the run fails. ``dead``: groups in the whole run."""
        self._dead.see(record)
        reason, service = failure_summary.short(self._dead.reason), self._service
        if reason != service.detail:
            another = failure_summary.kind(reason) != failure_summary.kind(service.detail)
            service.detail = reason
            self._gauge()
            service.metrics.set("dead", dead)
            if another:  # people should not have to wait for the next heartbeat
                service.spawn(service.announce())
        if (hopeless := self._dead.hopeless(self._limit)) is not None and not self.reason:
            service.log.error("run_failed", error=hopeless)
            await self._held()
            await runs.set_phase(service.bus, service.run, runs.FAILED, hopeless)
            self.reason, service.state = hopeless, STATE

    async def look(self) -> bool:
        """Learns from the bus how the run stands, and keeps the gauges. Returns whether a run that had failed goes on."""
        self._gauge()
        phase, reason = await runs.phase_and_reason(self._service.bus, self._service.run, deadline=120)
        if phase == runs.FAILED and not self.reason:
            self.reason, self._service.state = reason or "no reason was given", STATE
        elif phase != runs.FAILED and self.reason:
            self._service.log.info("goes_on", failed=self.reason)
            self._dead, self.reason, self._service.state = DeadGroups(), "", "ready"
            return True
        return False

    def _gauge(self) -> None:
        self._service.metrics.set("dead_per_minute", self._dead.per_minute(time.time()))
        self._service.metrics.set("eval_failed", self._dead.eval_failed)
