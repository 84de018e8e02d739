"""How long a run takes to continue after each fault, and how soon it says whom it waits for: real services, one run, fault after fault.

``python -m benchmarks.recovery [--json FILE] [--fast] [--times N] [--only WORDS] [--keep DIR] [--write]`` starts ``myxo up`` with a tiny
model (SGLang, a trainer of two ranks, NATS, Valkey, console), lets it train, and then, for each fault of `FAULTS`:

- ``kill``: kill -9; ``push``: the same while weights are being pushed; ``disk``: the disk that the run lies on is full for `FULL_SECONDS`
  (it needs root, for a disk of its own); ``freeze``: SIGSTOP, for good: the run's own watch has to end what is frozen
- ``seconds``: from the fault (the end of it, of a disk) to the next trained step, of replicas until they serve again; of what is frozen
  from the moment when it was killed
- ``named``: from the fault until the progress of ``myxo up`` names it; ``words``: that line. The same is looked for in the launcher's log
  and the console's API.

The last line of the report says whether the audit found the run whole. ``--write`` puts the table of `RESULTS` into docs/reliability.md.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page_table import put_table
from myxo.run.run_directory import RunDirectory
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.process.child_process import with_parent
from shared.runtime.host import host_memory
from shared.schema.service_messages import ServiceStatus
from tests.chaos.fast.fast_config import RUN, FastShape, sections, write_toml
from tests.chaos.fast.fast_config import write_model as write_fast_model
from tests.chaos.fast.fast_variant import FastVariant
from tests.chaos.observer import Observer
from tests.chaos.real.real_variant import RealVariant, real_sections, write_model
from tests.chaos.schedule import PUSH as PHASE_OF_PUSH
from tests.chaos.schedule import Fault, Schedule
from tests.chaos.variant import Processes, Start, Variant, alive, children
from tests.support.small_disk import SmallDisk, small_disk

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = Path(__file__).parent / "results" / "recovery.json", ROOT / "docs" / "reliability.md"
KILL, PUSH, DISK, FREEZE = "kill", "push", "disk", "freeze"
STEP, SERVING = "the next step", "serving"

FULL_SECONDS = 20.0
FROZEN_TIMEOUT = 25.0
"""`bus.frozen_timeout` of the run; the default is a minute."""

DISK_SIZE = "1g"
STEPS_BETWEEN = 2
"""Steps that are trained before the next fault."""

START_SECONDS, STEP_SECONDS = 900.0, 300.0
NAMED_S = 15.0

ON_ITS_WAY_S = 1.0
"""A step that is told of so soon after its trainer's end was trained before."""

FURTHER = ("trainer-0/other rank", "console")
"""Processes that the chaos suite has no name for."""


@dataclass(frozen=True)
class RecoveryFault:
    """One fault. ``named``: pattern of the words that attribute it; empty: nobody waits for it. ``target_s``: of ``until``."""

    kind: str
    target: str
    until: str
    target_s: float
    named: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"


FAULTS = (
    RecoveryFault(KILL, "rollout-0", SERVING, 30, "rollout"),
    RecoveryFault(KILL, "rollout-0/engine/scheduler", SERVING, 30, "rollout"),
    RecoveryFault(KILL, "rollout-0/engine/detokenizer", SERVING, 30, "rollout"),
    RecoveryFault(KILL, "trainer-0/rank", STEP, 60, "trainer"),
    RecoveryFault(KILL, "trainer-0", STEP, 60, "trainer"),
    RecoveryFault(KILL, "buffer-0", STEP, 30),
    RecoveryFault(KILL, "reward-0", STEP, 30),
    RecoveryFault(KILL, "nats", STEP, 10),
    RecoveryFault(KILL, "valkey", STEP, 10),
    RecoveryFault(PUSH, "nats", STEP, 10),
    RecoveryFault(PUSH, "valkey", STEP, 10),
    RecoveryFault(DISK, "run", STEP, 30, "No space left"),
    RecoveryFault(FREEZE, "buffer-0", STEP, 30, "buffer"),
    RecoveryFault(FREEZE, "reward-0", STEP, 30, "reward"),
    RecoveryFault(FREEZE, "rollout-0", STEP, 60, "rollout"),
    RecoveryFault(FREEZE, "rollout-0/engine/scheduler", STEP, 60, "rollout"),
    RecoveryFault(FREEZE, "trainer-0/rank", STEP, 60, "trainer"),
    RecoveryFault(FREEZE, "trainer-0/other rank", STEP, 60, "trainer"),
    RecoveryFault(FREEZE, "nats", STEP, 30, "NATS"),
    RecoveryFault(FREEZE, "valkey", STEP, 30, "Redis"),
    RecoveryFault(FREEZE, "console", STEP, 60),
)


@dataclass
class Recovery:
    """What came of one fault. Seconds; None: it did not come. ``steps``: trained when it came."""

    fault: str
    steps: int
    seconds: float | None = None
    ended_after: float | None = None
    named: dict[str, float] = field(default_factory=dict)
    words: str = ""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the figures there; the repository's are in {RESULTS}")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULTS into the docs; nothing is measured")
    parser.add_argument("--fast", action="store_true", help="the chaos suite's scripted engine and trainer in the place of the real ones")
    parser.add_argument("--times", type=int, default=1, help="of each fault")
    parser.add_argument("--only", default="", help="only faults whose name holds one of these words, separated by commas")
    parser.add_argument("--keep", type=Path, help="the run's directory, which is kept; it must not be there")
    arguments = parser.parse_args()
    if arguments.write:
        put_table(PAGE, "recovery", table(json.loads(RESULTS.read_text())))
        return 0
    only = [word for word in arguments.only.split(",") if word]
    there = [fault for fault in FAULTS if not (arguments.fast and "rank" in fault.target)]  # its trainer is one process
    faults = [fault for fault in there if not only or any(word in str(fault) for word in only)]
    with contextlib.ExitStack() as stack:
        place = arguments.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="myxo-recovery-", ignore_cleanup_errors=True))
        )
        place.mkdir(parents=True, exist_ok=True)
        found = asyncio.run(measure(place.absolute(), faults, arguments.times, arguments.fast))
    print(json.dumps(found, indent=2))
    print(table(found))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["audit"] == "ok" else 1


async def measure(place: Path, faults: list[RecoveryFault], times: int, fast: bool) -> dict[str, Any]:
    """Disturbs one run. Returns the figures of each fault, and the audit's verdict."""
    variant = FastVariant(write_fast_model(place / "model")) if fast else RealVariant(write_model(place / "model"))
    recoveries: list[Recovery] = []
    with _own_disk(place / "runs", any(fault.kind == DISK for fault in faults)) as disk:
        async with _launched(variant, place) as run:
            await run.steps(STEPS_BETWEEN, START_SECONDS)
            for fault in faults * times:
                if fault.kind != DISK or disk is not None:
                    recoveries.append(await run.disturb(fault, disk))
            run.interrupt()
        audit = subprocess.run(
            [sys.executable, "-m", "myxo.main", "audit", str(run.root), "--json"], cwd=ROOT, capture_output=True, text=True
        )
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores shared with other jobs, {host_memory()[0] >> 30} GiB",
        "fast": fast,
        "load": round(os.getloadavg()[2], 1),
        "frozen_timeout": FROZEN_TIMEOUT,
        "audit": "ok" if audit.returncode == 0 else audit.stdout + audit.stderr,
        "faults": [_figures(fault, [one for one in recoveries if one.fault == str(fault)]) for fault in faults],
        "report": run.report(),
    }


def prepared(place: Path, variant: Variant) -> Start:
    """Writes the config of a run that does not end by itself; returns how it is started."""
    shape = FastShape(steps=100_000, groups=2, samples=2, replicas=1, save_interval=3, eval_interval=50_000)
    start = variant.prepare(place, Schedule(0, shape, ()))
    values = (sections if isinstance(variant, FastVariant) else real_sections)(place, variant.model, shape)
    values["eval"]["skip_eval_before_train"] = True
    values["bus"] = {"frozen_timeout": FROZEN_TIMEOUT}
    values["console"] = {"console": True, "console_port": 0}
    write_toml(place, values)
    return start


def _own_disk(path: Path, needed: bool) -> contextlib.AbstractContextManager[SmallDisk | None]:
    @contextlib.contextmanager
    def mounted() -> Iterator[SmallDisk | None]:
        with contextlib.ExitStack() as stack:
            disk = None
            with contextlib.suppress(pytest.skip.Exception):
                disk = stack.enter_context(small_disk(path, DISK_SIZE))
            yield disk

    return mounted() if needed else contextlib.nullcontext()


@contextlib.asynccontextmanager
async def _launched(variant: Variant, place: Path) -> AsyncIterator["DisturbedRun"]:
    root, output, start = place / "runs" / RUN, place / "output", prepared(place, variant)
    for link in start.links.values():
        await link.open()
    own = {**os.environ, "OMP_NUM_THREADS": "1", **start.environment}
    with output.open("wb") as file:
        launcher = subprocess.Popen(with_parent(start.command), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=own)
    try:
        async with Observer(root, start.addresses) as observer:
            run = DisturbedRun(root, output, launcher, observer, variant.processes(place, launcher.pid))
            watching = asyncio.create_task(run.watch())
            try:
                yield run
                await asyncio.to_thread(launcher.wait, 120)
            finally:
                watching.cancel()
    finally:
        if launcher.poll() is None:
            launcher.kill()
        launcher.wait()
        for link in start.links.values():
            link.close()


class DisturbedRun:
    """A run under ``myxo up``, its faults, and what it says of them."""

    def __init__(self, root: Path, output: Path, launcher: subprocess.Popen[bytes], observer: Observer, processes: Processes) -> None:
        self.root, self._output, self._launcher, self._observer, self._processes = root, output, launcher, observer, processes
        self._statuses: list[ServiceStatus] = []
        self._served_at = 0.0

    async def watch(self) -> None:
        """Reads the registry, again and again."""
        bus: Bus | None = None
        while True:
            with contextlib.suppress(Exception):  # the bus is among what is killed
                servers = RunDirectory(self.root).servers()
                if bus is None and servers is not None:
                    bus = await Bus.connect(servers.nats_url, "recovery", deadline=10)
                if bus is not None:
                    self._statuses = await asyncio.wait_for(Registry(bus, RUN).alive(), 3)
            await asyncio.sleep(0.2)

    async def steps(self, count: int, within_s: float) -> None:
        """Waits for so many further steps."""
        goal = self._observer.steps + count
        await self._until(lambda: self._observer.steps >= goal, f"step {goal}", within_s)

    async def disturb(self, fault: RecoveryFault, disk: SmallDisk | None) -> Recovery:
        """Lets one fault happen, and waits until the run continues."""
        await self.steps(STEPS_BETWEEN, STEP_SECONDS)
        await self._until(lambda: self._serving(0.0), "a replica that serves", STEP_SECONDS)
        if fault.kind == PUSH:
            push = Fault(KILL, (fault.target,), PHASE_OF_PUSH, step=self._observer.steps + 1)
            await self._until(lambda: self._observer.is_due(push), "a push", STEP_SECONDS, pause=0.005)
        said = Said(self._output, self.root, fault.named)
        outcome, began, at = Recovery(str(fault), self._observer.steps), time.monotonic(), time.time()
        watching = asyncio.create_task(said.follow(began))
        try:
            ended = await self._apply(fault, disk)
            outcome.ended_after = round(ended - began, 1)
            if fault.until == SERVING:
                await self._until(lambda: self._serving(at), f"serving after {fault}", STEP_SECONDS)
            earliest = ended + (ON_ITS_WAY_S if fault.target.startswith("trainer") else 0.0)
            await self._until(lambda: self._trained_after(earliest), f"a step after {fault}", STEP_SECONDS)
            over = self._served_at if fault.until == SERVING else min(self._trained_after(earliest))
            outcome.seconds = round(over - ended, 1)
        finally:
            watching.cancel()
            outcome.named, outcome.words = said.seen, said.words
            print(json.dumps(asdict(outcome)), flush=True)
        return outcome

    async def _apply(self, fault: RecoveryFault, disk: SmallDisk | None) -> float:
        """Returns when the fault was over, monotonic seconds."""
        if fault.kind == DISK:
            assert disk is not None
            await asyncio.to_thread(disk.fill)
            await asyncio.sleep(FULL_SECONDS)
            disk.clear()
            return time.monotonic()
        victims = self._victims(fault.target)
        assert victims, f"{fault}: no such process"
        number = signal.SIGSTOP if fault.kind == FREEZE else signal.SIGKILL
        for pid in victims:
            os.kill(pid, number)
        if fault.kind == FREEZE:
            await self._until(lambda: not any(map(alive, victims)), f"the end of {fault.target}", FROZEN_TIMEOUT * 4 + 60)
        return time.monotonic()

    def _victims(self, target: str) -> list[int]:
        if target not in FURTHER:
            found = self._processes.pids(target)
            return found[:1] if target == "trainer-0/rank" else found
        if target == "console":
            lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(self._launcher.pid)}
            return [pid for pid, line in lines.items() if b"services.console" in line]
        return self._processes.pids("trainer-0/rank")[1:]

    def _trained_after(self, moment: float) -> list[float]:
        """Returns when steps were trained after ``moment``, monotonic seconds."""
        return [then for then in self._observer.trained_at.values() if then > moment]

    def _serving(self, since: float) -> bool:
        """Returns whether a replica serves that has begun to do so after ``since`` (seconds since the epoch)."""
        ready = [it for it in self._statuses if it.service == "rollout" and it.state == "ready" and it.version >= 0]
        found = any(it.state_since > since and it.at > since for it in ready)
        self._served_at = time.monotonic()
        return found

    def interrupt(self) -> None:
        """Asks the launcher to end."""
        self._launcher.send_signal(signal.SIGINT)

    def report(self) -> list[str]:
        """Returns what the launcher printed at the end: what went wrong, and what the run waited for."""
        text = self._output.read_text(errors="replace")
        return [line.strip() for line in text[text.rfind("what went wrong") :].splitlines() if line.strip()][:40]

    async def _until(self, condition: Any, what: str, within_s: float, pause: float = 0.05) -> None:
        end = time.monotonic() + within_s
        while not condition():
            if self._launcher.poll() is not None:
                raise SystemExit(f"the run ended before {what}: {self._output.read_text(errors='replace')[-3000:]}")
            if time.monotonic() > end:
                raise SystemExit(f"{what} did not come within {within_s:g} s: {self._output.read_text(errors='replace')[-3000:]}")
            await asyncio.sleep(pause)


class Said:
    """What is said of one fault: in the progress, in the launcher's log, by the console."""

    def __init__(self, output: Path, root: Path, pattern: str) -> None:
        self._paths = {"progress": output, "log": root / "logs" / "launcher.log"}
        self._begin = {name: path.stat().st_size if path.exists() else 0 for name, path in self._paths.items()}
        self._pattern, self._directory = re.compile(rf"waiting.for[^\n]*{pattern}[^\n]*") if pattern else None, RunDirectory(root)
        self.seen: dict[str, float] = {}
        self.words = ""

    async def follow(self, began: float) -> None:
        """Looks until it is cancelled. ``began``: monotonic seconds."""
        while self._pattern is not None and len(self.seen) < len(self._paths) + 1:
            for name, path in self._paths.items():
                if name not in self.seen and (found := self._pattern.search(self._new(name, path))):
                    self.seen[name] = round(time.monotonic() - began, 1)
                    if name == "progress":
                        self.words = " ".join(found[0].split()).replace(str(self._directory.root), "RUN")[:300]
            if "console" not in self.seen and self._pattern.search(await asyncio.to_thread(self._console)):
                self.seen["console"] = round(time.monotonic() - began, 1)
            await asyncio.sleep(0.2)

    def _new(self, name: str, path: Path) -> str:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._begin[name])
            return file.read().decode(errors="replace").replace("\n                ", " ")
        return ""

    def _console(self) -> str:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            address, _, token = self._directory.servers().console.partition("/?token=")
            request = urllib.request.Request(f"{address}/api/overview", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=3) as answer:
                waiting = json.load(answer)["waiting"]
            return f"waiting for {waiting['awaited']}"
        return ""


# --- what is shown


def _figures(fault: RecoveryFault, outcomes: list[Recovery]) -> dict[str, Any]:
    seconds = [one.seconds for one in outcomes if one.seconds is not None]
    named = [one.named[where] for one in outcomes for where in ("progress",) if where in one.named]
    return {
        **asdict(fault),
        "times": len(outcomes),
        "median": statistics.median(seconds) if seconds else None,
        "max": max(seconds, default=None),
        "named_max": max(named, default=None),
        "outcomes": [asdict(one) for one in outcomes],
    }


def table(found: dict[str, Any]) -> str:
    """Returns the page's table."""
    lines = ["| fault | until | seconds, median (max) | target | named after | words |", "|---|---|---|---|---|---|"]
    for row in found["faults"]:
        if not row["times"]:
            continue
        words = next((one["words"] for one in row["outcomes"] if one["words"]), "")
        named = "–" if row["named_max"] is None else f"{row['named_max']:g} s"
        shown = re.sub(r"/tmp/\S*?/runs", "runs", words.replace("|", "\\|"))[:160]
        seconds, name = f"{row['median']:g} ({row['max']:g})", f"{row['kind']} {row['target']}"
        lines.append(f"| {name} | {row['until']} | {seconds} | {row['target_s']:g} | {named} | {shown} |")
    under = f"{found['machine']} (load {found['load']:g}); `bus.frozen_timeout` {found['frozen_timeout']:g} s; audit: {found['audit']}."
    return "\n".join([*lines, "", under])


if __name__ == "__main__":
    sys.exit(main())
