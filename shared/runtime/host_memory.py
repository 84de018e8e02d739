"""Reads how much memory this machine has, or the container around this process."""

from pathlib import Path


def host_memory() -> tuple[int, int]:
    """Returns the bytes of memory that this machine, or the container around this process, has in all with swap, and that are free."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    known = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
    total, available = known["MemTotal"] + known["SwapTotal"], known["MemAvailable"] + known["SwapFree"]
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max" where there is none
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return total, available
    return min(total, limit), min(available, max(limit - used, 0))
