"""One run under ``myxo up`` and its schedule: starts it, disturbs it, waits for its end, and asks what must hold of what it left."""

import asyncio
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared.runtime.child_process import die_with_parent
from shared.runtime.embedded_servers import EmbeddedNats
from tests.chaos.fast.fast_config import RUN, write_run
from tests.chaos.fast.observer import Observer
from tests.chaos.fast.processes import RunProcesses
from tests.chaos.fast.remains import problems_of_remains
from tests.chaos.schedule import FREEZE, KILL, SHUTDOWN, Fault, Schedule

HANG_SECONDS = 90.0
"""A run that trains no step for so long, and does not end, hangs."""

RUN_SECONDS = 400.0
RECOVERY_SECONDS = 45.0
"""The longest time from a fault's end to the next trained step. Targets are far shorter; machines are slow and shared."""

PHASE_SECONDS = 60.0
"""The longest wait for a fault's phase; it then comes at once, whatever the phase."""

POLL_S = 0.01


@dataclass
class FaultResult:
    """What came of a fault. ``recovery_s``: from its end to the next trained step, None where the run was over. ``reached``: processes."""

    fault: str
    kind: str
    targets: tuple[str, ...]
    phase: str
    reached: int
    at_step: int
    recovery_s: float | None = None
    missed: bool = False


@dataclass
class SeedResult:
    """What came of a seed. ``problems``: what must not be; empty where it passed. ``state``: of the weights at the end, in hex."""

    seed: int
    schedule: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    faults: list[FaultResult] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    exit_code: int | None = None
    state: str = ""
    longest_gap_s: float = 0.0
    directory: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def disturb(schedule: Schedule, model: Path, parent: Path, *, keep: bool = False) -> SeedResult:
    """Runs a schedule's run to its end. ``parent``: where its directory is made; it is removed where nothing was found, unless ``keep``."""
    directory = Path(tempfile.mkdtemp(prefix=f"seed-{schedule.seed}-", dir=parent))
    result = SeedResult(schedule.seed, schedule.as_json(), directory=str(directory))
    began, used = time.monotonic(), _cpu_s()
    register, root = directory / "processes", directory / "runs" / RUN
    register.mkdir()
    (directory / "tmp").mkdir()
    config = write_run(directory, model, schedule.shape)
    own = {"MYXO_CHAOS_PROCESSES": str(register), "TMPDIR": str(directory / "tmp"), "MYXO_CACHE": str(directory / "cache")}
    with (directory / "output").open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.fast.fast_myxo", "up", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={**os.environ, **own},
        )
    processes = RunProcesses(register, launcher.pid)
    try:
        async with Observer(root) as observer:
            disturbing = asyncio.create_task(_disturb(schedule, processes, observer, result))
            try:
                await _wait(launcher, observer, result)
            finally:
                disturbing.cancel()
                await asyncio.wait([disturbing])
                if not disturbing.cancelled() and (error := disturbing.exception()) is not None:
                    raise error
            _note_recoveries(observer, result)
    finally:
        processes.send([*schedule_targets(schedule)], signal.SIGCONT)
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()
    await _left_behind(processes, result)
    result.exit_code = launcher.returncode
    if result.exit_code != 0 and not result.problems:
        result.problems.append(f"the run ended with exit code {result.exit_code}: {_last_line(directory / 'output')}")
    result.problems += await _remains(directory, root, schedule, result)
    result.seconds, result.cpu_s = round(time.monotonic() - began, 2), round(_cpu_s() - used, 2)
    if not (result.problems or keep):
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    return result


def schedule_targets(schedule: Schedule) -> set[str]:
    return {target for fault in schedule.faults for target in fault.targets}


async def _disturb(schedule: Schedule, processes: RunProcesses, observer: Observer, result: SeedResult) -> None:
    """Brings the faults, one after another; those that last go on while the next are waited for."""
    lasting: list[asyncio.Task[None]] = []
    try:
        for fault in schedule.faults:
            end = time.monotonic() + PHASE_SECONDS
            while not (due := observer.is_due(fault)) and (time.monotonic() < end and (not observer.finished or fault.phase == SHUTDOWN)):
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(fault.delay)
            outcome = FaultResult(str(fault), fault.kind, fault.targets, fault.phase, 0, observer.steps, missed=not due)
            result.faults.append(outcome)
            if fault.kind == KILL:
                outcome.reached = len(processes.send(fault.targets, signal.SIGKILL))
                _mark_end(outcome)
            elif fault.kind == FREEZE:
                lasting.append(asyncio.create_task(_freeze(fault, processes, outcome)))
        await asyncio.gather(*lasting)
    finally:
        for task in lasting:
            task.cancel()


async def _freeze(fault: Fault, processes: RunProcesses, outcome: FaultResult) -> None:
    """Stops processes for a while; those that others have started in their place are not touched."""
    reached = processes.send(fault.targets, signal.SIGSTOP)
    outcome.reached = len(reached)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        for pid in reached:
            if pid in [pid for target in fault.targets for pid in processes.pids(target)]:
                os.kill(pid, signal.SIGCONT)
        _mark_end(outcome)


_ENDS: dict[int, float] = {}


def _mark_end(outcome: FaultResult) -> None:
    _ENDS[id(outcome)] = time.monotonic()


def _note_recoveries(observer: Observer, result: SeedResult) -> None:
    for outcome in result.faults:
        if (ended := _ENDS.get(id(outcome))) is not None and outcome.reached:
            later = [at for at in observer.trained_at.values() if at > ended]
            outcome.recovery_s = round(min(later) - ended, 3) if later else None
            if outcome.recovery_s is not None and outcome.recovery_s > RECOVERY_SECONDS:
                result.problems.append(f"the next step came {outcome.recovery_s:g} s after: {outcome.fault}")
    times = sorted(observer.trained_at.values())
    result.longest_gap_s = round(max((b - a for a, b in itertools.pairwise(times)), default=0.0), 2)


async def _wait(launcher: "subprocess.Popen[bytes]", observer: Observer, result: SeedResult) -> None:
    """Returns once the launcher has ended, or is found to hang."""
    end, seen, moved = time.monotonic() + RUN_SECONDS, -1, time.monotonic()
    while launcher.poll() is None:
        await asyncio.sleep(0.05)
        if observer.steps + observer.finished != seen:
            seen, moved = observer.steps + observer.finished, time.monotonic()
        if time.monotonic() - moved > HANG_SECONDS or time.monotonic() > end:
            words = _last_line(Path(result.directory) / "output")
            result.problems.append(
                f"hangs after {observer.steps} steps: nothing came for {time.monotonic() - moved:.0f} s; it says: {words}"
            )
            return


async def _left_behind(processes: RunProcesses, result: SeedResult) -> None:
    end = time.monotonic() + 5.0
    while (left := processes.left()) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    if left:
        result.problems.append(f"processes are left behind: {', '.join(sorted(set(left.values())))}")
        for pid in left:
            os.kill(pid, signal.SIGKILL)


async def _remains(directory: Path, root: Path, schedule: Schedule, result: SeedResult) -> list[str]:
    """Reads the ledger with a server of its own, and checks it and the files."""
    if not (root / "nats").is_dir():
        return ["the run has left no ledger"]
    server = EmbeddedNats(root / "nats")
    await asyncio.to_thread(server.start)
    try:
        problems, state = await problems_of_remains(server.url, root, schedule.shape)
    finally:
        await asyncio.to_thread(server.stop)
    result.state = state.hex()
    summary = root / "summary.json"
    verdict = json.loads(summary.read_text()).get("audit") if summary.is_file() else "absent"
    if (verdict == "ok") == bool(problems):
        problems.append(f"the audit's own verdict is {verdict!r}")
    return problems


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


def _cpu_s() -> float:
    own, below = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + below.ru_utime + below.ru_stime
