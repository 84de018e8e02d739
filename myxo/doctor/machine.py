"""Examines memory, disk, limits, directories and the sandbox of a machine."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from myxo.doctor.diagnosis import Diagnosis
from myxo.preflight.machine_checks import FEW_FILES, GIB, nearest_existing, unwritable
from shared.runtime.host import host_memory
from shared.sandbox.program import SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxUnavailable

LEAST_MEMORY = 4 * GIB
"""Bytes that the quick start's services take together."""

LEAST_DISK, LITTLE_DISK = 256 << 20, 5 * GIB
"""Bytes without which a run cannot begin, and those that even small models' checkpoints soon fill."""


def examine_memory(_: Path) -> Iterator[Diagnosis]:
    """Yields host memory."""
    total, available = host_memory()
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if available < LEAST_MEMORY:
        yield Diagnosis("memory", "note", f"{found}; even the quick start takes {LEAST_MEMORY // GIB}", "ps aux --sort=-rss | head")
    else:
        yield Diagnosis("memory", "ok", found)


def examine_directory(directory: Path) -> Iterator[Diagnosis]:
    """Yields whether runs can be written where they are to lie, and what is free there."""
    place = nearest_existing(directory.absolute())
    if (reason := unwritable(directory.absolute())) is not None:
        yield Diagnosis("disk", "fault", reason, f"sudo chown {os.geteuid()} {place}, or give another directory: myxo up --dir DIR")
        return
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB are free on the disk of {place}"
    if free < LEAST_DISK:
        yield Diagnosis("disk", "fault", f"{found}: too few for any run", f"du -xh {place} | sort -h | tail, or give another --dir")
    elif free < LITTLE_DISK:
        yield Diagnosis("disk", "note", f"{found}; checkpoints fill that soon", "lower trainer.keep_checkpoints, or give another --dir")
    else:
        yield Diagnosis("disk", "ok", found)


def examine_cache(_: Path) -> Iterator[Diagnosis]:
    """Yields whether models of the hub can be kept."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    place = nearest_existing(cache.absolute())
    if os.access(place, os.W_OK | os.X_OK):
        yield Diagnosis("model cache", "ok", str(cache))
    else:
        found = f"{place} cannot be written, where models of the hub are kept"
        yield Diagnosis("model cache", "fault", found, f"sudo chown -R {os.geteuid()} {place}, or export HF_HOME=DIRECTORY")


def examine_limits(_: Path) -> Iterator[Diagnosis]:
    """Yields the limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        raised = FEW_FILES * 4 if hard == resource.RLIM_INFINITY else hard
        mend = f"ulimit -n {raised}" if raised > soft else "raise nofile in /etc/security/limits.conf, then log in again"
        yield Diagnosis("open files", "fault", f"a process may open {soft} at once: the run's servers need more", mend)
    else:
        yield Diagnosis("open files", "ok", "any number" if soft == resource.RLIM_INFINITY else f"{soft} at once")


def examine_sandbox(_: Path) -> Iterator[Diagnosis]:
    """Yields whether code of a model can be run apart from this machine."""
    try:
        with Sandbox(SandboxSettings()) as sandbox:
            sandbox.wait_ready()
    except SandboxUnavailable as error:
        found = f"{error}; only runs whose rewards or agents run a model's code need it"
        mend = "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), or user.max_user_namespaces=10000; see docs/sandbox.md"
        yield Diagnosis("sandbox", "note", found, mend)
    else:
        yield Diagnosis("sandbox", "ok", "programs run apart from this machine")
