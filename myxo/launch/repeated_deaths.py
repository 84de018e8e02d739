"""When a service that dies again and again is given up although it gets to work: by the error that it dies of. Pure."""

from __future__ import annotations

import re
import signal

from shared.runtime import failure_summary

MOST_SAME = 3
"""Deaths of one service by one error, no training step finished in between, after which another start is of no use."""

_OWN_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
"""Signals that a process brings upon itself; all others come from outside."""

_KILLED = re.compile(r"exit ?code: -(9|15)\b|signal (9|15)\b|SIGKILL|SIGTERM")
"""Of a process that the service had started."""


def from_outside(code: int) -> bool:
    """Whether a process with this exit code was killed by somebody else; its last words say nothing of why then."""
    return code < 0 and -code not in _OWN_SIGNALS


class SameDeaths:
    """The deaths of one service."""

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
