"""The command line of a sandbox that is a container of docker or podman, where bubblewrap cannot be. It is pure.

The image's Python runs the supervisor as the container's first process. Inside is the image, read-only; three folders in memory can be
written to. The supervisor is root there, with no right but to make its programs another user, end them and look at them; programs get the
same filter of system calls as under bubblewrap, by the supervisor, beside the runtime's own.
"""

from shared.runtime.host import HARDENED
from shared.sandbox.bwrap_command import SUPERVISOR_RIGHTS, TEMPORARY, WORK, environment
from shared.sandbox.program import SandboxSettings

FIRST_USER, USERS = 40_000, 20_000
"""Programs are one of these users, another in each sandbox: the kernel counts a user's processes over all containers. Systems give them to
nobody, and where containers have users of their own, there are as many."""

SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_BYTES = 1 << 20
"""Room for semaphores. What lies there is not counted, as what lies in the other two folders is."""

SLACK_BYTES, SLACK_PROCESSES = 192 << 20, 8
"""What the container may have beyond a program's limits: the supervisor, and what is taken between two of its looks."""

_PATH = "/usr/local/bin:/usr/bin:/bin"


def container_command(settings: SandboxSettings, name: str, user: int, supervisor: str) -> list[str]:
    """Returns the command line of a sandbox.

    Args:
        user: that of its programs. supervisor: its source.
    """
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
