"""Ends a computation in the main thread at its deadline, wherever it is: in Python, in sympy, in a regular expression.

The alarm's exception may come in the middle of a destructor or a callback, where Python drops it; so it is raised again until it is heeded.
What holds up the interpreter itself (C code that never looks for signals) is not ended: who waits for the process has to kill it.
"""

import signal
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

REPEAT_SECONDS = 0.2  # The pause between the alarms of a computation that continues after its deadline


class OutOfTime(BaseException):
    """The time of a computation is over. No Exception: libraries that continue after any error must not continue after this one."""


_armed = False


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """Returns the result of ``work``. Raises OutOfTime where it takes longer than ``seconds``. It uses the process's only alarm."""
    try:
        try:
            _arm(seconds)
            return work()
        finally:
            _disarm()
    finally:
        _disarm()  # for the alarm that came in the middle of the first one


def _arm(seconds: float) -> None:
    global _armed
    signal.signal(signal.SIGALRM, _on_alarm)
    _armed = True
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), REPEAT_SECONDS)


def _disarm() -> None:
    global _armed
    _armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)


def _on_alarm(*_: object) -> None:
    if _armed:
        raise OutOfTime
