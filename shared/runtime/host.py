"""The host's clock, memory and container runtime, and whether a process of it is certainly dead, from the mark that it left. Linux only;
elsewhere that is not known.

A mark is ``boot/namespace/pid/started``. Where boot and pid namespace are the reader's own, a live process of that mark stands in the
reader's process table: the inode of a namespace belongs to one namespace at a time, and a pid that was given to somebody else has
another start time. Where they differ (another machine, another container) nothing is said.
"""

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Literal

from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.safe_text import printable_line


def clock() -> float:
    """Returns seconds that also pass while this machine is suspended, if the system supports that (Linux); they never jump."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def host_memory() -> tuple[int, int]:
    """Returns the bytes of memory that this machine, or the container around this process, has in all with swap, and that are free."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    known = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
    total, available = known["MemTotal"] + known["SwapTotal"], known["MemAvailable"] + known["SwapFree"]
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max" where there is none
        parts = map(str.split, Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        cached = sum(int(size) for name, size in parts if name in ("active_file", "inactive_file"))  # which the kernel frees first
        used = int(Path("/sys/fs/cgroup/memory.current").read_text()) - cached
    except (OSError, ValueError):
        return total, available
    return min(total, limit), min(available, max(limit - used, 0))


def cores_awaited() -> float:
    """Returns the share of the last minute in which some process of this machine, or of the container around this process, waited for a
    core; 0 where the kernel does not say (pressure stall information)."""
    for path in ("/sys/fs/cgroup/cpu.pressure", "/proc/pressure/cpu"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            return float(Path(path).read_text().split("avg60=")[1].split()[0]) / 100
    return 0.0


Runtime = Literal["docker", "podman"]

CALL_SECONDS = 60.0  # The deadline for each call

# A container that was being made when its client was killed may appear a moment later: removal is tried again
REMOVALS, REMOVAL_PAUSE_S = 4, 0.5

# The variables by which the command lines find their engine. They stay outside of containers.
CLIENT_VARIABLES = (
    *("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_API_VERSION"),
    *("CONTAINER_HOST", "CONTAINERS_CONF", "XDG_RUNTIME_DIR"),
)

# What every container is started with: a root that nothing is written to, no capabilities, none to be had, no output kept on disk
HARDENED = ("--init", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pull", "never", "--log-driver", "none")


class RuntimeFailed(MyxoError):
    """The runtime is not there, does not answer, or refuses; the message has its words."""


def client_environment() -> dict[str, str]:
    """Returns the environment of a command line."""
    return {name: os.environ[name] for name in CLIENT_VARIABLES if name in os.environ}


def runtime_answer(runtime: str, *words: str) -> str:
    """Returns what a command of the runtime's prints. Raises RuntimeFailed."""
    try:
        done = subprocess.run(
            [runtime, *words],
            env=client_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeFailed(f"{runtime} {words[0]} did not end within {CALL_SECONDS:g} s") from None
    except OSError as error:
        raise RuntimeFailed(f"{runtime} cannot be started: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeFailed(printable_line(said[-1], 300) if said else f"{runtime} {words[0]} ended with exit code {done.returncode}")
    return done.stdout


def remove_container(runtime: str, name: str) -> None:
    """Removes a container whose client was killed, also where it is only being made. Raises RuntimeFailed."""
    for attempt in range(REMOVALS):
        if attempt:
            time.sleep(REMOVAL_PAUSE_S)
        if runtime_answer(runtime, "ps", "--all", "--quiet", "--filter", f"name=^{name}$").strip():
            runtime_answer(runtime, "rm", "--force", name)
            return


def check_containers(agent_runtime: str, agent_image: str, agent_network: str) -> None:
    """Raises ConfigError for the first of a runtime, an image and a network of agents' containers that is not there."""
    looked_at = {"agent_runtime": (agent_runtime, "version"), "agent_image": (agent_image, "image", "inspect", agent_image)}
    looked_at["agent_network"] = (agent_network, "network", "inspect", agent_network)
    for field, (value, *words) in looked_at.items():
        try:
            runtime_answer(agent_runtime, *words)
        except RuntimeFailed as error:
            raise ConfigError(f"rollout.{field}", value, f"one that is there where rollout services run: {error}") from None


def remove_labelled(runtime: str, label: str) -> None:
    """Removes all containers with a label, ``name=value``. Raises RuntimeFailed."""
    if found := runtime_answer(runtime, "ps", "--all", "--quiet", "--filter", f"label={label}").split():
        runtime_answer(runtime, "rm", "--force", *found)


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def process_mark() -> str:
    """Returns the mark of this process; empty if others could not check it."""
    try:
        return f"{_BOOT.read_text().strip()}/{os.readlink(_NAMESPACE)}/{os.getpid()}/{_started(os.getpid())[0]}"
    except OSError:
        return ""


def certainly_dead(other: str) -> bool:
    """Returns whether the process of a mark has certainly ended; False if it lives, or if that cannot be known here."""
    own = process_mark().split("/")
    parts = other.split("/")
    if len(own) != 4 or len(parts) != 4 or own[:2] != parts[:2] or not parts[2].isdecimal() or not int(parts[2]):
        return False
    try:
        with contextlib.suppress(PermissionError):  # a process of another user: it exists
            os.kill(int(parts[2]), 0)  # asks and does nothing; a /proc that hides other users' processes cannot be asked
        started, state = _started(int(parts[2]))
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return started != parts[3] or state in "ZX"


def _started(pid: int) -> tuple[str, str]:
    """Returns when a process started (clock ticks since boot), and its state. The name in front of them may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[19], fields[0]
