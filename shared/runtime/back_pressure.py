"""What this process holds back because a stream of the bus, or the store, is full: work in hand waits, none is lost, and none is added.

Whoever writes tries again within its deadline and, where there is no room, for as long as ``patience_s``; the service's status tells of
it meanwhile (`shared.service.service_base.Service.held_back`), and it continues by itself once there is room.
"""

import contextlib
import time
from collections.abc import Iterator

RETRY_PAUSE_S = 1.0  # The pause before the next attempt where there was no room: many groups may wait, each with its whole payload


class RoomAwaited:
    """One write that may have to wait, at most ``patience_s``. ``reason``: why there is no room for it; empty while there is."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s, self.reason = patience_s, ""
        self._since = time.monotonic()

    def refused(self, reason: str) -> None:
        """Notes that there is no room."""
        if not self.reason:
            self._since = time.monotonic()
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}; work is held back for {self.seconds:.0f} s now, given up after {self.patience_s:g} s"

    @property
    def seconds(self) -> float:
        """Returns for how long it has waited."""
        return time.monotonic() - self._since if self.reason else 0.0


class BackPressure:
    """The writes of one connection that wait for room.

    Attributes:
        patience_s: the seconds for which work waits for room, where its own deadline is shorter.
    """

    def __init__(self) -> None:
        self.patience_s = 0.0
        self._waiting: set[RoomAwaited] = set()

    @contextlib.contextmanager
    def write(self, patience_s: float) -> Iterator[RoomAwaited]:
        """Counts a write as waiting, once it was refused, until the body ends."""
        write = RoomAwaited(patience_s)
        self._waiting.add(write)
        try:
            yield write
        finally:
            self._waiting.discard(write)

    def __str__(self) -> str:
        """Returns the longest wait in words; nothing where no work waits."""
        waits = (write for write in self._waiting if write.reason and write.patience_s)
        return str(max(waits, key=lambda write: write.seconds, default=""))
