"""Run a command that dies with the process that asked for it, however that process ends.

    python -I -S leash.py COMMAND ARGUMENT...

The parent starts this file in a session of its own and keeps the write end of its standard input open. The kernel
closes that pipe when the parent ends, also by ``kill -9``; the leash then kills its whole process group at once, the
command's own children included. A pipe rather than ``PR_SET_PDEATHSIG`` alone, because that signal follows the parent's
*thread*, and because it would not reach children that the command spawned a moment ago. The other way round, the
command gets ``PR_SET_PDEATHSIG``: it dies should the leash be killed.

The leash ends with the command's exit status (128 + n after signal n). SIGTERM and SIGINT are passed on to the command.
Standard library only, started with ``-I -S``: it is there in 15 ms and keeps about 8 MB.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def _die_with_leash() -> None:
    """In the child, before exec: SIGKILL when the leash ends. On Linux only; elsewhere the pipe alone holds."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group_when_parent_ends() -> None:
    """Block until standard input ends, then kill this process group: the leash, the command, its children."""
    try:
        while os.read(0, 4096):
            pass
        _remove(os.environ.get("MYXO_RECEIVER"))
    finally:  # whatever happens to this thread: without it nothing would end the command
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _remove(directory: str | None) -> None:
    """The engine's directory of sockets and metrics, which the parent would have removed; it may be at it already."""
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def main(command: list[str]) -> int:
    """Run ``command`` to its end and return its exit status, in the shell's convention."""
    # No thread is running yet, so preexec_fn is safe here.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_leash)
    for passed_on in (signal.SIGTERM, signal.SIGINT):
        signal.signal(passed_on, lambda number, _frame: child.send_signal(number))
    threading.Thread(target=_kill_group_when_parent_ends, daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    if os.getpid() != os.getsid(0):
        sys.exit("leash.py must be started in a session of its own: it kills its process group")
    sys.exit(main(sys.argv[1:]))
