"""Programs of a sandbox, their limits and their results."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

# How a program ended: by itself with exit code 0, with another one, or by a signal; or because it reached the limit that is named
Status = Literal["ok", "exit_code", "signal", "wall_time", "cpu_time", "memory", "processes", "output"]
# Every status, in the order of the numbers that the supervisor sends (`shared.sandbox.program_supervisor`)
STATUSES: tuple[Status, ...] = get_args(Status)
_REFUSED_MEMORY = (b"MemoryError", b"std::bad_alloc", b"Cannot allocate memory")
_LAST_WORDS = 4096


SandboxKind = Literal["bwrap", "docker", "podman", "none"]


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of one program, with every process that it starts.

    wall_s: seconds by the clock. cpu_s: seconds of processor time, of all processes together. memory_bytes: of all processes together, with
    what lies in the work folder. processes: at once, threads counted. output_bytes: of standard output and standard error, each.
    disk_bytes: of the work folder and of ``/tmp``, each. open_files: of each process.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 64
    output_bytes: int = 1 << 20
    disk_bytes: int = 64 << 20
    open_files: int = 256


@dataclass(frozen=True)
class SandboxSettings:
    """The settings of a sandbox.

    kind: ``bwrap``; ``docker`` or ``podman``, in a container of ``image``; or ``none``, which isolates nothing and has to be asked for.
    packages: the packages of this environment, or of the image, can be imported. paths: files and folders that are read-only inside, where
    they are outside. devices: device files, such as a GPU's. lease_s: the seconds without a request after which a sandbox ends.
    """

    kind: SandboxKind = "bwrap"
    image: str = ""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    packages: bool = False
    paths: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    lease_s: float = 300.0


@dataclass(frozen=True)
class Program:
    """A program to run. command: a program and its arguments; or else sources: Python, executed one after the other in one namespace, in a
    fork of an interpreter that has started already. They may write to descriptor `REPORT`. stdin: all of its standard input; it is nowhere
    in a program's memory before that reads it. harness: Python that is executed before the sources; it and they import nothing of the work
    folder, where programs before this one may have written."""

    command: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    stdin: bytes = b""
    harness: str = ""


REPORT = 3  # The descriptor for a verdict beside the standard output, of `Program.sources`


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program. stdout, stderr, report: what it wrote, up to the limit; truncated: it wrote more. wall_s, cpu_s,
    memory_bytes: what it took."""

    status: Status
    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    report: bytes
    truncated: bool
    wall_s: float
    cpu_s: float
    memory_bytes: int

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def words(self) -> str:
        """Returns the end of the program in words."""
        ends = {
            "ok": "ended with exit code 0",
            "exit_code": f"ended with exit code {self.exit_code}",
            "signal": f"ended by signal {self.signal}",
            "wall_time": f"ran out of time after {self.wall_s:.1f} s",
            "cpu_time": f"ran out of processor time after {self.cpu_s:.1f} s of it",
            "memory": f"ran out of memory; it had {self.memory_bytes >> 20} MiB",
            "processes": "started too many processes",
            "output": "wrote too much",
        }
        return ends[self.status]


def status_of(status: Status, stderr: bytes) -> Status:
    """Returns the status, where a program ended by itself because it was refused memory: ``memory``. It says so in its last words."""
    ended_itself = status in ("exit_code", "signal")
    return "memory" if ended_itself and any(words in stderr[-_LAST_WORDS:] for words in _REFUSED_MEMORY) else status
