"""The system calls that no program in a sandbox needs, as a seccomp filter for bubblewrap.

They are the ones that have led out of namespaces before, that reach what is in no namespace (the kernel's keys, ``AF_VSOCK`` to the host of
a virtual machine), or that hold memory which no limit counts. A refused call answers EPERM, so that programs go on without it.
Numbers: Linux's ``asm/unistd_64.h`` and ``asm-generic/unistd.h``. Format: ``struct sock_filter`` of ``linux/filter.h``, seccomp(2).
"""

import platform
import struct
from errno import EAFNOSUPPORT, ENOSYS, EPERM

REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
"""The calls that are refused, with their numbers on x86-64 and on aarch64; None where there is no such call."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _CLONE3, _IOCTL, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (16, 29), (41, 198), (53, 199)
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID and _NEWNET."""

_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into the terminal of whoever started the program."""

_FAMILIES = (1,)
"""AF_UNIX. Others have nobody to speak to; and what TCP holds for connections to oneself is counted for the whole machine."""

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
