"""Watches the disk that a run's directory lies on: while it is full nothing is restarted, and afterwards what gave up on it is."""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

from shared.runtime.errors import MyxoError
from shared.view.run_view import full_disk

POLL_SECONDS = 0.2


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

    def look(self, now: float, elsewhere: str = "") -> bool:
        """Looks at the disk. Returns whether it has room again that it had not. Raises DiskFull.

        Args:
            now: monotonic seconds. elsewhere: what to say of another disk without room that the run writes to.
        """
        full, had_none = full_disk(self._root) or elsewhere, bool(self.text)
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


async def until_room(watch: DiskWatch, say: Callable[[str], None], stopped: Callable[[], bool]) -> bool:
    """Returns once the disk has room, or ``stopped``: whether it has. ``say`` is told of a wait. Raises DiskFull."""
    told = False
    while not stopped():
        watch.look(time.monotonic())
        if not watch.text:
            return True
        if not told:
            say(f"Waiting for room: {watch.text}")
        told = True
        await asyncio.sleep(POLL_SECONDS)
    return False


_NO_SPACE = re.compile(r"(?P<path>/[^:\n]*): (?:no space left on device|disk quota exceeded)", re.IGNORECASE)
"""What Go says of a write that found no room: ``write PATH: no space left on device``."""

READ_BYTES = 1 << 18
"""The most of a log that one look reads; of what was written faster the end counts."""

ROOM_SECONDS = 1.0
"""For so long a path must have had room before a server counts as one that refuses although there is."""


class RefusedWrites:
    """Finds in a server's log that it had no room to write: nats-server refuses all messages of such a stream until it is restarted, though
    there be room again, and says so each time.

    Args:
        log: its log. What stands in it already does not count.

    ``path``: the file that could not be written; None where none was refused.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = self._size()
        self._roomy_since: float | None = None
        self.path: Path | None = None

    def look(self) -> None:
        """Reads what is new in the log."""
        size = self._size()
        if size != self._read:
            begin = max(self._read if size > self._read else 0, size - READ_BYTES)
            self._read = size
            with self._log.open("rb") as file:
                file.seek(begin)
                found = _NO_SPACE.findall(file.read(READ_BYTES).decode(errors="replace"))
            self.path = Path(found[-1]) if found else self.path

    def forget(self) -> None:
        """Begins anew, for a server that is started again."""
        self.path, self._roomy_since, self._read = None, None, self._size()

    def full(self) -> str:
        """Returns what to say of the disk while it has no room for the file; empty: it has, or nothing was refused."""
        return "" if self.path is None else _full(self.path)

    def refuses_still(self, now: float) -> bool:
        """Returns whether writes were refused, and there is room since a moment. ``now``: monotonic seconds."""
        if self.path is None or self.full():
            self._roomy_since = None
            return False
        self._roomy_since = now if self._roomy_since is None else self._roomy_since
        return now - self._roomy_since >= ROOM_SECONDS

    def _size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0


def _full(path: Path) -> str:
    """Returns what to say of the disk of a file that may be gone."""
    there = next((parent for parent in path.parents if parent.is_dir()), None)
    return full_disk(there) if there is not None else ""
