"""Says what to do where bubblewrap may not make a sandbox, by what it says itself and by the kernel's settings."""

from collections.abc import Callable
from pathlib import Path

from shared.sandbox.bwrap_command import bwrap_program

APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
CLONE = "kernel.unprivileged_userns_clone"
NAMESPACES = "user.max_user_namespaces"

_CONTAINER = (
    "in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
    "systempaths=unconfined (docs/sandbox.md)"
)

Setting = Callable[[str], str | None]
"""Name of a kernel setting → its value; None where the kernel has no such."""


def kernel_setting(name: str) -> str | None:
    """Returns the value of a setting as sysctl shows it."""
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None


def remedy(words: str, setting: Setting = kernel_setting, program: str | None = None) -> str:
    """Returns why there is no sandbox, and what helps.

    Args:
        words: what bubblewrap said. setting: reads the kernel's settings. program: the path of bubblewrap.
    """
    program = program or bwrap_program()
    if program is None:
        return "bubblewrap is not installed: pip install 'myxo[reward]', or the system's package bubblewrap"
    for name, forbidding, allowed in ((CLONE, "0", "1"), (NAMESPACES, "0", "10000")):
        if setting(name) == forbidding:
            return f"{words}; this kernel forbids user namespaces: sysctl -w {name}={allowed}"
    if setting(APPARMOR) == "1":
        profile = f"profile myxo-bwrap {program} flags=(unconfined) {{ userns, }}"
        return (
            f"{words}; AppArmor restricts user namespaces here (Ubuntu from 23.10 on): load a profile that allows them to bubblewrap, "
            f"/etc/apparmor.d/myxo-bwrap: 'abi <abi/4.0>, {profile}', or for all programs: sysctl -w {APPARMOR}=0"
        )
    if any(part in words for part in ("ermission denied", "ermitted", "No permissions", "mount proc")):
        return f"{words}; {_CONTAINER}"
    return words
