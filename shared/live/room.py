"""How much room is left: on a run's disk, and in this machine's memory."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from shared.runtime.host_memory import host_memory


@dataclass(frozen=True)
class Room:
    """Free and all bytes of something."""

    free: int
    total: int

    @property
    def share(self) -> float:
        """Returns the share that is free."""
        return self.free / self.total if self.total else 1.0

    def __str__(self) -> str:
        return f"{self.free / 2**30:.1f} of {self.total / 2**30:.1f} GiB free"


def disk_room(directory: Path | None) -> Room | None:
    """Returns the room on the disk of a directory; None where this machine has no such directory."""
    try:
        usage = shutil.disk_usage(directory) if directory is not None else None
    except OSError:
        return None
    return Room(usage.free, usage.total) if usage is not None else None


def memory_room() -> Room:
    """Returns the room in the memory of this machine, or of the container around this process, with swap."""
    total, free = host_memory()
    return Room(free, total)
