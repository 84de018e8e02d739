"""The run's failure: found by the count of dead groups, or reported by a launcher; kept on the bus until the run is created again.

While it stands the buffer admits nothing and tells the trainer to leave. Nothing is restarted: services idle, or are stopped.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable

from shared.bus import runs
from shared.runtime import failure_summary
from shared.runtime.telemetry import declare_metrics
from shared.schema import ledger
from shared.schema.ledger import PAYLOAD_LOST, LedgerRecord
from shared.service.service_base import Service

declare_metrics("""
    dead_per_minute | groups/min | that died lately
    eval_failed | prompts | held-out prompts that failed since the service started
""")

STATE = "run failed"  # State of a buffer whose run has failed. The buffer itself is well.
RATE_SECONDS = 120.0  # The rate of dead groups is that of so many seconds before now


class DeadGroups:
    """Decides when a run is hopeless, from how many groups ended dead in a row, how fast, and why. Pure: it takes ledger records.

    A held-out prompt that fails counts like a dead group, and one that is scored ends the row like a scored group, since a general fault
    fails both. The count begins anew with each buffer process, since a restart of the run may have repaired the cause.
    ``in_a_row``: since a group was last scored. ``eval_failed``: held-out prompts that failed. ``refused``: groups that died of the
    trainer's refusals, or of the store's losses, for one step: they came back scored, so they are not of the row, and are no good either.
    """

    def __init__(self) -> None:
        self.in_a_row, self.eval_failed, self.reason = 0, 0, ""
        self.refused = 0
        self._refused: set[str] = set()
        self._ended: deque[float] = deque()
        self._since: float | None = None

    def see(self, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        self._since = record.at if self._since is None else self._since
        match record:
            case ledger.EvalScored(rewards=[], reason=reason) if reason.endswith(PAYLOAD_LOST):
                self.eval_failed += 1
            case ledger.GroupDead(group=name, reason=reason) | ledger.EvalScored(group=name, rewards=[], reason=reason):
                refused, self.reason = name in self._refused or reason.startswith(PAYLOAD_LOST), reason
                self.refused += refused
                self.in_a_row += not refused
                self.eval_failed += isinstance(record, ledger.EvalScored)
                self._ended.append(record.at)
                self._forget(record.at)
            case ledger.GroupsScored() | ledger.EvalScored():
                self.in_a_row = 0
            case ledger.SampleRefused(group=name):
                self._refused.add(name)
            case ledger.GroupRequeued(group=name):
                self._refused.discard(name)
            case ledger.BatchTrained() | ledger.BatchAmended(added=[]):  # the latter: a step that goes on without what was refused
                self.refused = 0

    def per_minute(self, now: float) -> float:
        """Returns the dead groups a minute, as of late. ``now``: seconds since the epoch."""
        self._forget(now)
        seconds = min(RATE_SECONDS, now - (now if self._since is None else self._since))
        return len(self._ended) * 60.0 / max(seconds, 60.0)

    def hopeless(self, limit: int) -> str | None:
        """Returns why the run has to stop, once ``limit`` groups (0: never) have ended dead in a row."""
        if not limit or max(self.in_a_row, self.refused) < limit:
            return None
        refused = self.refused >= limit
        what = f"{self.refused} groups for one step were refused or lost" if refused else f"{self.in_a_row} groups in a row failed"
        return f"{what} (rollout.max_dead_in_a_row = {limit}), the last one: {failure_summary.short(self.reason)}"

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0] < now - RATE_SECONDS:
            self._ended.popleft()


class RunFailure:
    """Keeps whether the run has failed, and why.

    Args:
        limit: `max_dead_in_a_row`. held: awaited before the bus is notified; raises where another buffer is active.
    """

    def __init__(self, service: Service, limit: int, held: Callable[[], Awaitable[None]]) -> None:
        self._service, self._limit, self._held = service, limit, held
        self._dead = DeadGroups()
        self.reason = ""  # Why the run has failed; empty while it has not

    async def see(self, record: LedgerRecord, dead: int) -> None:
        """Takes a record that was just made, and fails the run where it is hopeless by now. ``dead``: dead groups of the whole run."""
        self._dead.see(record)
        reason, service = failure_summary.short(self._dead.reason), self._service
        if reason != service.detail:
            known, service.detail = service.detail, reason
            self._gauge()
            service.metrics.set("dead", dead)
            if failure_summary.kind(reason) != failure_summary.kind(known):  # people should not have to wait for the next heartbeat
                service.spawn(service.announce())
        if (hopeless := self._dead.hopeless(self._limit)) is not None and not self.reason:
            service.log.error("run_failed", error=hopeless)
            await self._held()
            await runs.set_phase(service.bus, service.run, runs.FAILED, hopeless)
            self.reason, service.state = hopeless, STATE

    async def look(self, finished: bool = False) -> bool:
        """Asks the bus whether the run has failed, and keeps the gauges. Returns whether a run that had failed continues.

        A phase that cannot be read is written anew. ``finished``: whether the run is, by its ledger.
        """
        self._gauge()
        phase, reason = await runs.phase_and_reason(self._service.bus, self._service.run, deadline=120)
        if phase == runs.UNREADABLE:
            phase, reason = (runs.FINISHED if finished else runs.FAILED if self.reason else runs.RUNNING), self.reason
            self._service.log.error("phase_unreadable", next_action="it is written anew", phase=phase)
            await self._held()
            await runs.set_phase(self._service.bus, self._service.run, phase, reason)
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
