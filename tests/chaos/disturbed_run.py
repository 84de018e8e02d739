"""One run under ``myxo up`` and its schedule: starts it, disturbs it, waits for its end, and asks what must hold of what it left."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nats.js.errors import NotFoundError

from shared.process.child_process import with_parent
from shared.process.embedded_servers import EmbeddedNats
from shared.runtime import exit_codes
from shared.runtime.tasks import cancelled
from tests.chaos.disturbance import FaultResult, Victim, disturb
from tests.chaos.fast.fast_config import RUN
from tests.chaos.ledger_check import LedgerCheck, LedgerFindings, ledger_messages
from tests.chaos.observer import Observer
from tests.chaos.schedule import DISK_FULL, Schedule
from tests.chaos.variant import Processes, Variant
from tests.support.small_disk import SmallDisk, small_disk

MOST_PROBLEMS = 12
WORDS_SECONDS = 20.0
"""The time after which the launcher's line has to name whom a run waits for: 15 s, and some for a busy machine."""

_NAMED_WAIT = re.compile(r"waiting for (?!a training step)\S+|^myxo: \S+-\d+ ended ")
"""A wait that names somebody, or whose deaths a run is given up for."""
POLL_S = 0.05
DISK_SIZE = "128m"


@dataclass
class SeedResult:
    """What came of a seed.

    Args:
        problems: what must not be; empty where it passed. ending: the last words of a run that did not reach its end. state: of the weights
            at the end, in hex. given_up: groups that died. longest_gap_s: between two trained steps.
    """

    seed: int
    schedule: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    faults: list[FaultResult] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    exit_code: int | None = None
    ending: str = ""
    state: str = ""
    given_up: int = 0
    longest_gap_s: float = 0.0
    directory: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def run_seed(schedule: Schedule, variant: Variant, parent: Path, *, keep: bool = False) -> SeedResult:
    """Runs a schedule's run to its end. ``parent``: where its directory is made; it is removed where nothing was found, unless ``keep``."""
    directory = Path(tempfile.mkdtemp(prefix=f"seed-{schedule.seed}-", dir=parent))
    result = SeedResult(schedule.seed, schedule.as_json(), directory=str(directory))
    began, used = time.monotonic(), _cpu_s()
    with _own_disk(schedule, directory / "runs") as disk:
        await _disturbed(schedule, variant, directory, disk, result)
        if disk is not None and (result.problems or keep):
            shutil.copytree(directory / "runs", directory / "kept", ignore=shutil.ignore_patterns(".filler"))
    result.seconds, result.cpu_s = round(time.monotonic() - began, 2), round(_cpu_s() - used, 2)
    if not (result.problems or keep):
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    return result


def _own_disk(schedule: Schedule, path: Path) -> contextlib.AbstractContextManager[SmallDisk | None]:
    """Returns the run's own disk, where it is to become full and this process may mount one."""
    needed = any(fault.kind == DISK_FULL for fault in schedule.faults)
    return small_disk(path, DISK_SIZE) if needed and os.geteuid() == 0 else contextlib.nullcontext()


async def _disturbed(schedule: Schedule, variant: Variant, directory: Path, disk: SmallDisk | None, result: SeedResult) -> None:
    root = directory / "runs" / RUN
    (directory / "tmp").mkdir()
    start = variant.prepare(directory, schedule)
    for link in start.links.values():
        await link.open()
    own = {"TMPDIR": str(directory / "tmp"), "MYXO_CACHE": str(directory / "cache")}
    with (directory / "output").open("wb") as output:
        launcher = subprocess.Popen(
            with_parent(start.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **own, **start.environment},
        )
    processes = variant.processes(directory, launcher.pid)
    try:
        async with Observer(root, start.addresses) as observer:
            socket = start.addresses.own_valkey_path if start.addresses is not None else ""
            victim = Victim(root, launcher.pid, processes, observer, start.links, disk, socket, result.faults)
            disturbing = asyncio.create_task(disturb(schedule, victim))
            try:
                await _wait(launcher, observer, disturbing, variant, result)
            finally:
                await cancelled([disturbing])
            _note_recoveries(observer, variant, result)
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()
        for link in start.links.values():
            link.close()
    await _left_behind(processes, result)
    result.exit_code = launcher.returncode
    if result.exit_code != 0:
        result.ending = _last_line(directory / "output")
        if not (schedule.lossy and result.exit_code == exit_codes.RUN_FAILED):  # what was taken away may be needed
            result.problems.append(f"the run ended with exit code {result.exit_code}: {result.ending}")
    result.problems += await _remains(root, schedule, variant, result)


def _note_recoveries(observer: Observer, variant: Variant, result: SeedResult) -> None:
    for outcome in result.faults:
        if outcome.ended and outcome.reached:
            later = [at for at in observer.trained_at.values() if at > outcome.ended]
            outcome.recovery_s = round(min(later) - outcome.ended, 3) if later else None
            if outcome.recovery_s is not None and outcome.recovery_s > variant.limits.recovery:
                result.problems.append(f"the next step came {outcome.recovery_s:g} s after: {outcome.fault}")
    times = sorted(observer.trained_at.values())
    result.longest_gap_s = round(max((b - a for a, b in itertools.pairwise(times)), default=0.0), 2)


async def _wait(
    launcher: "subprocess.Popen[bytes]", observer: Observer, disturbing: "asyncio.Task[None]", variant: Variant, result: SeedResult
) -> None:
    """Returns once the launcher has ended, or is found to hang."""
    end, seen, moved = time.monotonic() + variant.limits.whole, -1, time.monotonic()
    unnamed = False
    while launcher.poll() is None:
        await asyncio.sleep(POLL_S)
        if disturbing.done():
            disturbing.result()
        if observer.steps + observer.finished != seen:
            seen, moved = observer.steps + observer.finished, time.monotonic()
        stalled = time.monotonic() - moved
        if stalled > WORDS_SECONDS and not (observer.finished or unnamed):
            line = _last_line(Path(result.directory) / "output", ("step ", "myxo: "))
            if unnamed := _NAMED_WAIT.search(line) is None:
                result.problems.append(f"{stalled:.0f} s after step {observer.steps} its line names nobody: {line}")
        if stalled > variant.limits.hang or time.monotonic() > end:
            words = _last_line(Path(result.directory) / "output")
            result.problems.append(f"hangs after {observer.steps} steps: nothing came for {stalled:.0f} s; it says: {words}")
            return


async def _left_behind(processes: Processes, result: SeedResult) -> None:
    end = time.monotonic() + 5.0
    while (left := processes.left()) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    if left:
        result.problems.append(f"processes are left behind: {', '.join(sorted(set(left.values())))}")
        for pid in left:
            os.kill(pid, signal.SIGKILL)


async def _remains(root: Path, schedule: Schedule, variant: Variant, result: SeedResult) -> list[str]:
    """Reads the ledger with a server of its own, and checks it and the files."""
    if not (root / "nats").is_dir():
        return ["the run has left no ledger"]
    check = LedgerCheck(schedule.shape.staleness, schedule.shape.groups)
    server = EmbeddedNats(root / "nats")
    await asyncio.to_thread(server.start)
    try:
        for sequence, data in await ledger_messages(server.url, RUN):
            check.take(sequence, data)
    except NotFoundError:
        return ["the run has left no ledger"]
    finally:
        await asyncio.to_thread(server.stop)
    found = check.end()
    result.state = found.state.hex()
    result.given_up = sum(end.startswith("dead") for end in found.ends.values())
    problems = [*found.problems, *_ends(schedule, found, result), *variant.problems(root, schedule, found)]
    summary = root / "summary.json"
    verdict = json.loads(summary.read_text()).get("audit") if summary.is_file() else "absent"
    unwritten = verdict == "absent" and any(fault.kind == DISK_FULL for fault in schedule.faults)
    if (verdict == "ok") == bool(problems) and not (schedule.lossy or unwritten):
        problems.append(f"the audit's own verdict is {verdict!r}")
    return problems[:MOST_PROBLEMS]


def _ends(schedule: Schedule, found: LedgerFindings, result: SeedResult) -> list[str]:
    """Returns what is wrong with how the run and its groups ended. A run that was robbed may give up groups, or itself."""
    problems = []
    if (not found.finished or found.steps != schedule.shape.steps) and (result.exit_code == 0 or not schedule.lossy):
        problems.append(f"{found.steps} of {schedule.shape.steps} steps were trained; finished: {found.finished}")
    if not schedule.lossy:
        problems += [f"{group} died: {end}" for group, end in found.ends.items() if end.startswith("dead")]
    return problems


def _last_line(path: Path, begins: tuple[str, ...] = ("",)) -> str:
    """Returns the last line that begins so: alarms and what helps against them are lines between those of the run's state."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip() and line.startswith(begins)]
    return lines[-1][:300] if lines else "nothing"


def _cpu_s() -> float:
    own, below = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + below.ru_utime + below.ru_stime
