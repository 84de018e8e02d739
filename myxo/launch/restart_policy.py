"""When a process that died starts again, and when it is given up. Pure: the caller tells what happened.

A service that never gets to work is given up by `BackOff`; one that gets to work and dies of the same error each time, by `SameDeaths`.
"""

import re
import signal

from shared.runtime import failure_summary

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0

HEALTHY_SECONDS = 60.0
"""A life of this length forgives the deaths before it: the next wait starts at the beginning again."""

MOST_DEATHS = 10
"""Deaths in a row, none of these lives ready, after which starting again is pointless."""


class BackOff:
    """The waits of one process between its lives: ``first`` seconds, doubling up to ``longest``.

    Args:
        at_once: the first death of a row is followed by no wait at all (servers, which everybody else waits for).
    """

    def __init__(
        self,
        first: float = FIRST_SECONDS,
        longest: float = LONGEST_SECONDS,
        healthy: float = HEALTHY_SECONDS,
        most: int = MOST_DEATHS,
        at_once: bool = False,
    ) -> None:
        self._first, self._longest, self._healthy, self._most, self._at_once = first, longest, healthy, most, at_once
        self._short_lives = 0
        self.deaths_unready = 0
        """Deaths in a row without having been ready."""

    def died(self, lived: float, ready: bool) -> float | None:
        """Takes note of a death after ``lived`` seconds; ``ready``: whether it had got to work in that life.

        Returns the seconds to wait before the next start; None when it should not be started any more.
        """
        self.deaths_unready = 0 if ready else self.deaths_unready + 1
        if self.deaths_unready >= self._most:
            return None
        self._short_lives = 1 if lived >= self._healthy else self._short_lives + 1
        doublings = self._short_lives - 1
        if self._at_once:
            if doublings == 0:
                return 0.0
            doublings -= 1
        return min(self._longest, self._first * 2.0 ** min(doublings, 64))


MOST_SAME = 3
"""Deaths of one service by one error, without a finished training step in between, after which another start is of no use."""

_OWN_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
"""Signals that a process brings upon itself; all others come from outside."""

_KILLED = re.compile(r"exit ?code: -(9|15)\b|signal (9|15)\b|SIGKILL|SIGTERM")
"""Words of a process that the service had started and somebody killed."""


def from_outside(code: int) -> bool:
    """Tells whether a process with this exit code was killed by somebody else: its last words do not say why."""
    return code < 0 and -code not in _OWN_SIGNALS


class SameDeaths:
    """Counts the deaths of one service by the same error. ``count``: of the newest error, in a row."""

    def __init__(self) -> None:
        self._kind, self._steps, self.count = "", 0, 0

    def died(self, code: int, reason: str, steps: int) -> bool:
        """Takes note of a death; returns whether the service should be given up.

        Args:
            code: its exit code, negative for a signal. reason: its last error. steps: training steps finished until now.
        """
        if from_outside(code) or _KILLED.search(reason):
            return False
        kind = f"{code}: {failure_summary.kind(reason)}"
        again = kind == self._kind and steps <= self._steps
        self._kind, self._steps, self.count = kind, steps, self.count + 1 if again else 1
        return self.count >= MOST_SAME
