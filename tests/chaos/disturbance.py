"""Brings faults upon a run: signals to its processes, its links, its disk, its messages, its files."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.chaos.fast.fast_config import RUN
from tests.chaos.link_proxy import EVERYBODY, LinkProxy, LinkState
from tests.chaos.observer import Observer
from tests.chaos.schedule import CUT, DELAY, DELETE, DISK_FULL, DUPLICATES, FREEZE, KILL, SHUTDOWN, SLOW, TRUNCATE, Fault, Schedule
from tests.chaos.variant import Processes
from tests.support.small_disk import SmallDisk

PHASE_SECONDS = 60.0
"""The longest wait for a fault's phase; it then comes at once, whatever the phase."""

POLL_S = 0.01
DUTY_S, AWAKE_SHARE = 0.2, 0.1
"""The period of a process that is slowed down, and the share of it in which it runs: ten times slower."""

DELAY_S = 0.15
"""By which a delayed link's chunks come later, each way."""

TORN_BYTES = 200
"""Cut off the end of a log that is torn, as by a loss of power."""


@dataclass
class FaultResult:
    """What came of a fault.

    Args:
        reached: processes, links, files or keys that it hit; 0: there were none. at_step: steps trained when it came. missed: its phase
            did not come in time. ended: monotonic seconds. recovery_s: from its end to the next trained step; None: the run was over.
    """

    fault: str
    kind: str
    targets: tuple[str, ...]
    phase: str
    reached: int = 0
    at_step: int = 0
    missed: bool = False
    ended: float = 0.0
    recovery_s: float | None = None


@dataclass
class Victim:
    """All of a run that faults can hit. ``links``: by the server's name. ``disk``: the run's own, if it could be made."""

    root: Path
    launcher: int
    processes: Processes
    observer: Observer
    links: dict[str, LinkProxy]
    disk: SmallDisk | None
    valkey_socket: str
    results: list[FaultResult] = field(default_factory=list)


async def disturb(schedule: Schedule, victim: Victim) -> None:
    """Brings the faults, one after another; those that last continue while the next are waited for."""
    lasting: list[asyncio.Task[None]] = []
    observer = victim.observer
    try:
        for fault in schedule.faults:
            end = time.monotonic() + PHASE_SECONDS
            while not (due := observer.is_due(fault)) and time.monotonic() < end and (not observer.finished or fault.phase == SHUTDOWN):
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(fault.delay)
            outcome = FaultResult(str(fault), fault.kind, fault.targets, fault.phase, at_step=observer.steps, missed=not due)
            victim.results.append(outcome)
            lasting.append(asyncio.create_task(_bring(fault, victim, outcome)))
            if not fault.seconds:
                await lasting[-1]
        await asyncio.gather(*lasting)
    finally:
        for task in lasting:
            task.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)


async def _bring(fault: Fault, victim: Victim, outcome: FaultResult) -> None:
    try:
        await BRINGERS[fault.kind](fault, victim, outcome)
    finally:
        outcome.ended = time.monotonic()


async def _kill(fault: Fault, victim: Victim, outcome: FaultResult) -> None:
    outcome.reached = len(victim.processes.send(fault.targets, signal.SIGKILL))


async def _freeze(fault: Fault, victim: Victim, outcome: FaultResult) -> None:
    """Stops processes for a while; those that others have started in their place are not touched."""
    reached = victim.processes.send(fault.targets, signal.SIGSTOP)
    outcome.reached = len(reached)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        _wake(reached)


async def _slow(fault: Fault, victim: Victim, outcome: FaultResult) -> None:
    end = time.monotonic() + fault.seconds
    while time.monotonic() < end:
        reached = victim.processes.send(fault.targets, signal.SIGSTOP)
        outcome.reached = max(outcome.reached, len(reached))
        try:
            await asyncio.sleep(DUTY_S * (1 - AWAKE_SHARE))
        finally:
            _wake(reached)
        await asyncio.sleep(DUTY_S * AWAKE_SHARE)


def _wake(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def _on_link(fault: Fault, victim: Victim, outcome: FaultResult) -> None:
    """Cuts or delays a link, which is as before afterwards."""
    server, _, client = fault.targets[0].partition(" link")
    link, outcome.reached = victim.links[server], 1
    state = LinkState({client.removeprefix("/") or EVERYBODY}) if fault.kind == CUT else LinkState(set(), DELAY_S)
    link.set(state)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        link.set(LinkState(set()))


async def _duplicate(fault: Fault, victim: Victim, outcome: FaultResult) -> None:
    async with victim.observer.duplicating() as counted:
        await asyncio.sleep(fault.seconds)
    outcome.reached = counted()


async def _fill(fault: Fault, victim: Victim, outcome: FaultResult) -> None:
    if victim.disk is None:
        return
    outcome.reached = 1
    victim.disk.fill()
    try:
        end = time.monotonic() + fault.seconds
        while time.monotonic() < end:
            await asyncio.sleep(0.1)
            victim.disk.fill()  # what others have given back meanwhile
    finally:
        victim.disk.clear()


async def _truncate(fault: Fault, victim: Victim, outcome: FaultResult) -> None:
    """Cuts a file short while whoever writes it is down: the launcher is stopped meanwhile, since it would start it again."""
    target, root = fault.targets[0], victim.root
    writer = {"checkpoint": "trainer-0", "snapshot": "trainer-0", "aof": "valkey", "stream block": "nats"}[target]
    os.kill(victim.launcher, signal.SIGSTOP)
    try:
        if not victim.processes.send([writer], signal.SIGKILL):
            return
        await asyncio.sleep(0.1)
        found = {
            "checkpoint": lambda: _newest(root / "checkpoints", "*/*"),
            "snapshot": lambda: _newest(root / "weights", "**/*.safetensors"),
            "aof": lambda: _newest(root / "valkey", "**/*.incr.aof"),
            "stream block": lambda: _newest(root / "nats", "**/msgs/*.blk"),
        }[target]()
        if found is None:
            return
        size = found.stat().st_size
        os.truncate(found, size // 2 if target in ("checkpoint", "snapshot") else max(0, size - TORN_BYTES))
        outcome.reached = 1
    finally:
        os.kill(victim.launcher, signal.SIGCONT)


def _newest(directory: Path, pattern: str) -> Path | None:
    """Returns the largest file of the newest directory that has some that match."""
    files = [(path.parent.stat().st_mtime_ns, path.stat().st_size, path) for path in directory.glob(pattern) if path.is_file()]
    return max(files)[2] if files else None


async def _delete(fault: Fault, victim: Victim, outcome: FaultResult) -> None:
    """Deletes every other payload that is there."""
    connection = Redis(unix_socket_path=victim.valkey_socket, socket_timeout=2)
    with contextlib.suppress(RedisError, OSError):
        keys = sorted(await connection.keys(f"{RUN}:group:*"))[::2]
        outcome.reached = int(await connection.delete(*keys)) if keys else 0
    with contextlib.suppress(RedisError, OSError):
        await connection.aclose()


BRINGERS: dict[str, Callable[[Fault, Victim, FaultResult], Coroutine[Any, Any, None]]] = {
    KILL: _kill,
    FREEZE: _freeze,
    SLOW: _slow,
    CUT: _on_link,
    DELAY: _on_link,
    DUPLICATES: _duplicate,
    DISK_FULL: _fill,
    TRUNCATE: _truncate,
    DELETE: _delete,
}
"""Kind of fault → what brings it."""
