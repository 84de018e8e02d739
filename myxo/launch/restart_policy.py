"""Decides when a process that died is restarted, and when it is given up. Pure: the caller reports the events.

A service that never becomes ready is given up by `BackOff`; one that becomes ready and dies of the same error each time, by `SameDeaths`.
"""

import re
import signal
from dataclasses import dataclass

from shared.runtime import failure_summary


@dataclass
class BackOff:
    """The waits of one process before its restarts."""

    first: float = 0.5
    longest: float = 30.0
    """Seconds of the first wait, and of the longest; each wait is twice the one before."""
    healthy: float = 60.0
    """The uptime after which earlier deaths no longer count: the next wait is the first one again."""
    most: int = 10
    """The number of deaths in a row, without having been ready, after which the process is given up."""
    at_once: bool = False
    """True if there is no wait after the first death of a row (for servers, which all services need)."""
    short_lives: int = 0
    deaths_unready: int = 0
    """Deaths in a row until now: after a short life, and without having been ready."""

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


MOST_SAME = 3
"""The number of deaths of one service by one error, without a finished training step in between, after which it is given up."""

_OWN_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
"""Signals that a process causes itself; all others come from outside."""

_KILLED = re.compile(r"exit ?code: -(9|15)\b|signal (9|15)\b|SIGKILL|SIGTERM")
"""Matches the log of a service whose own child process was killed from outside."""


def from_outside(code: int) -> bool:
    """Returns whether a process with this exit code was killed from outside: its last log lines then do not say why."""
    return code < 0 and -code not in _OWN_SIGNALS


@dataclass
class SameDeaths:
    """Counts the deaths of one service by the same error. ``count``: of the newest error, in a row."""

    count: int = 0
    kind: str = ""
    steps: int = 0

    def died(self, code: int, reason: str, steps: int) -> bool:
        """Notes a death; returns whether the service should be given up.

        Args:
            code: its exit code, negative for a signal. reason: its last error. steps: training steps finished until now.
        """
        if from_outside(code) or _KILLED.search(reason):
            return False
        kind = f"{code}: {failure_summary.kind(reason)}"
        again = kind == self.kind and steps <= self.steps
        self.kind, self.steps, self.count = kind, steps, self.count + 1 if again else 1
        return self.count >= MOST_SAME
