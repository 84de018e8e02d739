"""Groups that end dead: how many in a row, how fast, why, and from when on a run is hopeless. Pure: fed with ledger records.

A held-out prompt that fails counts like a dead group, and one that is scored ends the row like a scored group: what lets every response
fail lets them all fail. The count is of this buffer's life, not of the run: whoever starts the run again has mended something.
"""

from __future__ import annotations

from collections import deque

from shared.runtime import failure_summary
from shared.schema.ledger import EvalScored, GroupDead, GroupsScored, LedgerRecord

RATE_SECONDS = 120.0
"""The rate is that of the last minutes: over so many seconds."""


class DeadGroups:
    """See the module's docstring. ``in_a_row``: since a group was last scored. ``eval_failed``: held-out prompts that failed."""

    def __init__(self) -> None:
        self.in_a_row, self.eval_failed, self.reason = 0, 0, ""
        self._ended: deque[float] = deque()
        self._since: float | None = None

    def see(self, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        self._since = record.at if self._since is None else self._since
        match record:
            case GroupDead(reason=reason) | EvalScored(rewards=[], reason=reason):
                self.in_a_row, self.reason = self.in_a_row + 1, reason
                self.eval_failed += isinstance(record, EvalScored)
                self._ended.append(record.at)
                self._forget(record.at)
            case GroupsScored() | EvalScored():
                self.in_a_row = 0
            case _:
                pass

    def per_minute(self, now: float) -> float:
        """Dead groups a minute, as of late. ``now``: seconds since the epoch."""
        self._forget(now)
        seconds = min(RATE_SECONDS, max(1.0, now - (now if self._since is None else self._since)))
        return len(self._ended) * 60.0 / max(seconds, 60.0)

    def hopeless(self, limit: int) -> str | None:
        """Why the run has to stop, once ``limit`` groups (0: never) have ended dead in a row."""
        if not limit or self.in_a_row < limit:
            return None
        reason = failure_summary.short(self.reason)
        return f"{self.in_a_row} groups in a row failed (rollout.max_dead_in_a_row = {limit}), the last one: {reason}"

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0] < now - RATE_SECONDS:
            self._ended.popleft()
