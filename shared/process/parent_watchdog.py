"""Runs a command that ends with the process that started it, however that process ends. `shared.process.child_process` starts it.

    python -I -S parent_watchdog.py LIFELINE SCRATCH COMMAND ARGUMENT...
    python -I -S parent_watchdog.py alone PARENT COMMAND ARGUMENT...

LIFELINE is the read end of a pipe whose write end the parent holds. The kernel closes that one when the parent ends, also by ``kill -9``;
the watchdog then removes the directory SCRATCH ("" for none) and kills its whole process group, the command's children included. A pipe is
used because ``PR_SET_PDEATHSIG`` follows the parent's *thread* and does not reach children of the command. The other way round the command
gets ``PR_SET_PDEATHSIG``, so that it dies should the watchdog be killed.

Processes that leave the group (daemons, which have sessions of their own) become the watchdog's children when their parents end
(PR_SET_CHILD_SUBREAPER): they go with the command, too.

The second form watches nothing: it asks for ``PR_SET_PDEATHSIG`` and becomes the command. A ``preexec_fn`` would ask for it in a fork of a
process with threads, which waits forever for a lock that one of them held.

The watchdog ends as its command does: with its exit code or by its signal. It passes SIGTERM and SIGINT on. It uses the standard library
only and is started with ``-I -S``: it is there in 15 ms and takes about 8 MB.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import NoReturn

ALONE = "alone"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>

MOST_SWEEPS = 100  # How often descendants are looked for: those that fork faster than they are killed are not waited for


def _ask_kernel(option: int, value: int) -> None:
    """Sets an attribute of the calling process. It works on Linux only; elsewhere the pipe alone holds."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _send(pid: int, number: int) -> None:
    """Sends a signal, also to a process that has just ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_descendants(root: int) -> None:
    """Kills all living processes below a process, and not itself. It reads ``/proc/*/stat``, fields 3 and 4 (proc(5))."""
    for _ in range(MOST_SWEEPS):
        parents = {}
        for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
            try:
                with open(f"/proc/{name}/stat") as stat:
                    state, parent = stat.read().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):  # it ended while being looked at
                continue
            parents[int(name)] = (int(parent), state)
        below = {root}
        while further := {pid for pid, (parent, _) in parents.items() if parent in below} - below:
            below |= further
        living = [pid for pid in below - {root} if parents[pid][1] != "Z"]
        if not living:
            return
        for pid in living:
            _send(pid, signal.SIGKILL)


def _kill_group_when_parent_ends(lifeline: int, scratch: str) -> None:
    try:
        while os.read(lifeline, 4096):
            pass
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        kill_descendants(os.getpid())
    finally:  # whatever happens to this thread: without it nothing would end the command
        os.killpg(os.getpgid(0), signal.SIGKILL)


def become(parent: int, command: list[str]) -> NoReturn:
    """Turns this process into ``command``, which is killed when the thread that started it ends. ``parent``: whose child it is."""
    _ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("its parent has ended")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python has them ignored, which the command would inherit
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


def main(lifeline: int, scratch: str, command: list[str]) -> int:
    """Runs ``command`` to its end and returns its exit code."""
    _ask_kernel(PR_SET_CHILD_SUBREAPER, 1)
    # no thread is running yet, so preexec_fn is safe here
    started = subprocess.Popen(command, preexec_fn=lambda: _ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL))
    child = started.pid  # ``started`` is kept: as it goes, it would take the exit code of a command that has ended already
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # whoever holds the other ends is to see when the command has closed its own
        os.dup2(nothing, descriptor)
    for passed_on in (signal.SIGTERM, signal.SIGINT):
        signal.signal(passed_on, lambda number, _frame: _send(child, number))
    threading.Thread(target=_kill_group_when_parent_ends, args=(lifeline, scratch), daemon=True).start()
    ended, status = os.wait()
    while ended != child:  # an orphan
        ended, status = os.wait()
    status = os.waitstatus_to_exitcode(status)
    kill_descendants(os.getpid())
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    if sys.argv[1] == ALONE:
        become(int(sys.argv[2]), sys.argv[3:])
    if os.getpid() != os.getsid(0):
        sys.exit("parent_watchdog.py must be started in a session of its own: it kills its process group")
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
