"""What differs between the suite's variants: how a run is started, who its processes are, and what more must hold of what it leaves."""

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.ledger_check import LedgerFindings
from tests.chaos.link_proxy import LinkProxy, ProxiedAddresses
from tests.chaos.schedule import Schedule

SERVERS = {"nats": "nats-server", "valkey": "valkey-server"}
"""Names of servers → their programs."""


@dataclass(frozen=True)
class Limits:
    """Seconds. A run that trains no step for ``hang`` hangs; ``recovery``: from a fault's end to the next step; ``whole``: of a run."""

    hang: float
    recovery: float
    whole: float


@dataclass
class Start:
    """How a run is started. ``addresses``: of its servers, where ``links`` lie before them."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    addresses: ProxiedAddresses | None = None
    links: dict[str, LinkProxy] = field(default_factory=dict)


class Processes(ABC):
    """The processes of a run by their names. ``launcher``: its pid."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher

    @abstractmethod
    def named(self, target: str) -> list[int]:
        """Returns the processes of a name, oldest first, dead ones maybe among them."""

    @abstractmethod
    def left(self) -> dict[int, str]:
        """Returns the processes that live although the launcher has ended: pid → name."""

    def pids(self, target: str) -> list[int]:
        """Returns the living processes of a name, oldest first."""
        if target in SERVERS:
            return [pid for pid in children(self._launcher) if program(pid) == SERVERS[target]]
        return [pid for pid in self.named(target) if alive(pid)]

    def send(self, targets: Sequence[str], number: signal.Signals) -> list[int]:
        """Sends a signal to the processes of several names at once; returns whom it reached."""
        reached = []
        for pid in [pid for target in targets for pid in self.pids(target)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                reached.append(pid)
        return reached


class Variant(ABC):
    """One way to run a seed. ``model``: the checkpoint that all its runs share."""

    limits: Limits

    def __init__(self, model: Path) -> None:
        self.model = model

    @abstractmethod
    def prepare(self, directory: Path, schedule: Schedule) -> Start:
        """Writes a run's files, below ``directory``."""

    @abstractmethod
    def processes(self, directory: Path, launcher: int) -> Processes:
        """Returns a started run's processes."""

    @abstractmethod
    def problems(self, root: Path, schedule: Schedule, found: LedgerFindings) -> list[str]:
        """Returns what must not be of a run's files, by its ledger."""


def alive(pid: int) -> bool:
    """Returns whether a process lives, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Returns a process's children."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def program(pid: int) -> str:
    """Returns the name of a process's program."""
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""
