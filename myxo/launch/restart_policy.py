"""Decides when a process that died is restarted, and when it is given up. Pure: the caller reports the events.

A service that never becomes ready is given up by `BackOff`; one that becomes ready and dies all the same, while the run gets no further, by
`SameDeaths`.
"""

import re
import signal
from collections import Counter
from dataclasses import dataclass, field

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

MOST_DEATHS = 10
"""The number of its deaths by anything: errors that take turns, and kills from outside, for the kernel kills what takes too much memory."""

_OWN_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
"""Signals that a process causes itself; all others come from outside."""

_KILLED = re.compile(r"exit ?code: -(9|15)\b|signal (9|15)\b|SIGKILL|SIGTERM")
"""Matches the log of a service whose own child process was killed from outside."""


def from_outside(code: int) -> bool:
    """Returns whether a process with this exit code was killed from outside: its last log lines then do not say why."""
    return code < 0 and -code not in _OWN_SIGNALS


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

        Args:
            code: its exit code, negative for a signal. reason: its last error. steps: training steps finished until now.
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
