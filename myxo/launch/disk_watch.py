"""Watches the disk that a run's directory lies on: while it is full nothing is restarted, and afterwards what gave up on it is."""

from pathlib import Path

from shared.live.service_failures import full_disk
from shared.runtime.errors import MyxoError


class DiskFull(MyxoError):
    """The disk stayed full for longer than a run waits for room."""


class DiskWatch:
    """The disk of ``root``.

    Args:
        patience_s: the seconds that the disk may be full before the run stops.

    ``text``: what to say of it, empty while it has room.
    """

    def __init__(self, root: Path, patience_s: float) -> None:
        self._root, self._patience_s = root, patience_s
        self._since: float | None = None
        self.text = ""

    def look(self, now: float) -> bool:
        """Looks at the disk. Returns whether it has room again that it had not. ``now``: monotonic seconds. Raises DiskFull."""
        full, had_none = full_disk(self._root), bool(self.text)
        if not full:
            self.text, self._since = "", None
            return had_none
        self._since = now if self._since is None else self._since
        waited = now - self._since
        if waited > self._patience_s:
            raise DiskFull(f"{full}, for {waited:.0f} s; the run stops, `myxo up` with the same config goes on once there is room")
        until = f"for {waited:.0f} s now, given up after {self._patience_s:g} s"
        self.text = f"{full}; what fails for it starts again once there is room ({until})"
        return False
