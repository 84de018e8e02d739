"""What the processes of a sandbox have taken, as the sandbox's first process sees it, and their end.

Imports little: each sandbox starts it anew.
"""

import _signal
import os
import time

FIRST = os.getpid() == 1
"""Whether this is process 1 of a sandbox, which sees no others; without bubblewrap it is one of the host's."""

ENTRY_BYTES, SOCKET_BYTES = 2 << 10, 208 << 10
"""What the kernel keeps for a file of any size, and at most for data that nobody has read from a local socket."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processes() -> list[int]:
    """Returns all other processes of the sandbox; without bubblewrap, what the supervisor and its descendants have started."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if FIRST:
        return [pid for pid in pids if pid != 1]
    parents = {pid: int(fields[1]) for pid in pids if (fields := _stat(pid))}
    found, new = set[int](), {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in new} - found:
        found |= new
    return list(found)


def kill_all() -> None:
    """Kills every process of the sandbox but this one."""
    if FIRST:
        _kill(-1)
        return
    while living := [pid for pid in processes() if (fields := _stat(pid)) and fields[0] != b"Z"]:
        for pid in living:
            _kill(pid)
        time.sleep(0.001)


def _kill(pid: int) -> None:
    try:  # noqa: SIM105 (contextlib takes long to import)
        os.kill(pid, _signal.SIGKILL)
    except ProcessLookupError:
        pass


def _stat(pid: int) -> list[bytes]:
    """Returns the fields of ``/proc/PID/stat`` from the third on (proc(5)): state, parent, …; none where the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", 0) as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def usage_of(pid: int) -> tuple[int, int, float]:
    """Returns a process's threads, its bytes of memory but for files, and its processor seconds with those of its dead children."""
    fields = _stat(pid)
    if not fields:
        return 0, 0, 0.0
    return (
        int(fields[17]),
        _sum(f"/proc/{pid}/status", b"RssAnon:", b"RssShmem:", b"VmPTE:") or 0,
        sum(map(int, fields[11:15])) / _TICKS_PER_S,
    )


def _sum(path: str, *names: bytes) -> int | None:
    """Returns the sum of a file's lines of these names, which are in kB, in bytes; None where it cannot be read."""
    try:
        with open(path, "rb", 0) as file:
            return sum(int(line.split()[1]) << 10 for line in file.read().splitlines() if line.startswith(names))
    except OSError:  # it has ended, or does not let itself be looked at
        return None


def exact(pids: list[int]) -> int:
    """Returns the bytes of processes' memory, each page once although several share it. It takes the kernel much longer to say."""
    total = 0
    for pid in pids:
        shared = _sum(f"/proc/{pid}/smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:")
        total += usage_of(pid)[1] if shared is None else shared + (_sum(f"/proc/{pid}/status", b"VmPTE:") or 0)
    return total


def filled(work: str) -> int:
    """Returns the bytes of memory that belong to no process: the two folders with their entries, and what sockets may hold unread."""
    if not FIRST:
        return 0
    found = [os.statvfs(folder) for folder in (work, "/tmp")]
    with open("/proc/net/sockstat", "rb", 0) as file:
        sockets = int(file.readline().split()[2])
    entries = sum(each.f_files - each.f_ffree for each in found)
    return sum((each.f_blocks - each.f_bfree) * each.f_frsize for each in found) + entries * ENTRY_BYTES + sockets * SOCKET_BYTES


def refused_memory() -> int:
    """Returns how many processes of its container the kernel has killed for want of memory, by either version of control groups."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control") if FIRST else ():
        try:
            with open(path, "rb", 0) as file:
                return sum(int(line.split()[1]) for line in file.read().splitlines() if line.startswith(b"oom_kill "))
        except OSError:
            continue
    return 0
