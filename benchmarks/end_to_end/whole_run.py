"""One run under ``myxo up`` at one bound, watched from outside until it has made its steps or its time is over; replicas may join it."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.gpu_watch import GpuWatch
from benchmarks.end_to_end.joining_replicas import JoiningReplicas
from benchmarks.end_to_end.run_record import RunRecord, summed
from benchmarks.end_to_end.scale_record import ScaleRecord, join_after
from myxo.run.run_directory import RunDirectory
from shared.bus.bus_errors import TRANSIENT
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.devices import VISIBLE
from shared.process.child_process import with_parent
from shared.runtime.errors import MyxoError
from shared.schema.ledger import BatchFormed, GroupRequeued, GroupsDropped, GroupsScored
from shared.schema.messages import Trained
from shared.schema.service_messages import MetricsWritten, ServiceEvent
from shared.view.metric_history import CAUGHT_UP

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("run.toml")

POLL_INTERVAL_S = 0.25
STOP_SECONDS = 60.0

METRICS_SECONDS = 1.0
"""The time in which the metrics of the last step come."""

AUDIT_SECONDS = 120.0
"""The deadline for the audit of a ledger."""


@dataclass(frozen=True)
class RunPlan:
    """What every run of a measurement has in common. ``flags``: of ``myxo up``; ``steps``: to make; ``warm_up``: of them, left out at
    most: the groups that are admitted together at the beginning make one batch more than the bound.

    ``start_s``, ``run_s``: seconds for the first step, and from it on. ``gpus``: that it has. ``devices``: GPUs, as CUDA_VISIBLE_DEVICES
    names them, those of replicas that join last; none on a CPU. ``engines``: that it begins with. ``scale_to``: that it continues with once
    it has made half of its steps; the other half is counted from when all serve. None: it is not scaled.
    """

    directory: Path
    model: Path
    prompts: Path
    flags: tuple[str, ...]
    steps: int
    warm_up: int
    start_s: float
    run_s: float
    gpus: int
    devices: tuple[str, ...] = ()
    engines: int = 1
    scale_to: int | None = None

    @property
    def own(self) -> int:
        """Returns how many of the devices the run itself has."""
        return len(self.devices) - self.joining if self.devices else 0

    @property
    def joining(self) -> int:
        """Returns how many replicas join."""
        return 0 if self.scale_to is None else self.scale_to - self.engines


def measured(plan: RunPlan, name: str, bound: int, further: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the figures of a run with ``max_staleness = bound``; with a ``problem`` where it did not come far enough.

    Those of a run that is scaled are of the time before it; what came of it is in ``scaled``, what its ledger proves in ``audit``.
    """
    root = plan.directory / name
    shutil.rmtree(root, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "myxo.main", "up", str(CONFIG), "--fresh", "--name", name, "--dir", str(plan.directory)),
        *("--hf-checkpoint", str(plan.model), "--prompt-data", str(plan.prompts), "--max-staleness", str(bound)),
        *plan.flags,
        *further,
    ]
    environment = {**os.environ, **({VISIBLE: ",".join(plan.devices[: plan.own])} if plan.devices else {})}
    watch, began = GpuWatch(plan.devices).start(), time.time()
    plan.directory.mkdir(parents=True, exist_ok=True)
    joining = JoiningReplicas(name, root / "logs", plan.engines, plan.engines + plan.joining, plan.devices[plan.own :])
    with (plan.directory / f"{name}.out").open("wb") as output:
        process = subprocess.Popen(with_parent(command), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        watched = WatchedRun(plan, name, bound, process, joining)
        try:
            with joining:
                problem = asyncio.run(watched.until_over())
        finally:
            _ended(process)
            watch.stop()
    figures = watched.figures(watch)
    record = watched.record
    first = record.steps[0].ended - began if record.steps else None
    audit = {"audit": audited(name, plan.directory)} if plan.joining and record.steps else {}
    return {
        "bound": bound,
        "first_step_after_s": first and round(first, 1),
        **figures,
        **audit,
        **({"stopped": problem} if problem else {}),
    }


def audited(run: str, directory: Path) -> dict[str, Any]:
    """Returns what ``myxo audit`` says of the ledger of a run that is not in progress; why it says nothing, as ``problem``."""
    command = [sys.executable, "-m", "myxo.main", "audit", run, "--dir", str(directory), "--json"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=AUDIT_SECONDS, stdin=subprocess.DEVNULL)
        told = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"ok": False, "problem": f"no answer in {AUDIT_SECONDS:g} s"}
    except ValueError:
        return {"ok": False, "problem": done.stderr.strip()[-500:]}
    return {name: told[name] for name in ("ok", "violations", "admitted", "trained", "in_flight", "steps", "max_staleness_seen")}


class WatchedRun:
    """A run that continues, and those that join it.

    Args:
        process: of ``myxo up``.
    """

    def __init__(self, plan: RunPlan, name: str, bound: int, process: subprocess.Popen[bytes], joining: JoiningReplicas) -> None:
        self._plan, self._name, self._bound, self._process, self._joining = plan, name, bound, process, joining
        self._directory = RunDirectory(plan.directory / name)
        self._warm_up = min(plan.warm_up, bound + 1)
        self._join_after = join_after(plan.steps, self._warm_up)
        self._bus: Bus | None = None
        self._registry: Registry | None = None
        self.record, self.scale = RunRecord(), ScaleRecord()

    def figures(self, watch: GpuWatch) -> dict[str, Any]:
        """Returns the figures, with those of the GPUs that ``watch`` has read."""
        plan, record, scale = self._plan, self.record, self.scale
        last = scale.before(record) if plan.joining else None
        found = record.figures(self._warm_up, plan.gpus, last) | _busy(watch, record.window(self._warm_up, last))
        if plan.joining:
            gpus = plan.gpus + (plan.joining if plan.devices else 0)
            found["scaled"] = scale.figures(record, self._bound, self._warm_up, plan.engines + plan.joining, gpus)
            if (settled := scale.settled(record, self._bound)) is not None:
                found["scaled"]["after"] |= _busy(watch, record.window(settled))
        return found

    async def until_over(self) -> str:
        """Follows the run until it has made its steps. Returns why it was left before, if it was."""
        plan, record = self._plan, self.record
        end, begun = time.monotonic() + plan.start_s, False
        try:
            while not self._over():
                if self._process.poll() is not None:
                    return f"myxo up ended with {self._process.returncode}; its output: {self._directory.root}.out"
                if record.steps and not begun:
                    begun, end = True, time.monotonic() + plan.run_s
                if time.monotonic() > end:
                    return f"its {plan.run_s if begun else plan.start_s:g} s were over after {len(record.steps)} steps"
                await self._look()
                if problem := self._joining.problem():
                    return problem
                await asyncio.sleep(POLL_INTERVAL_S)
            await asyncio.sleep(METRICS_SECONDS)
            return ""
        finally:
            if self._bus is not None:
                await self._bus.close()

    def _over(self) -> bool:
        if self._plan.joining:
            return self.scale.is_over(self.record, self._bound, self._plan.steps - self._join_after)
        return len(self.record.steps) >= self._plan.steps

    async def _look(self) -> None:
        """Reads what the replicas tell of themselves; has others join when it is time."""
        servers = self._directory.servers()
        if self._bus is None and servers is not None:
            self._bus = await Bus.connect(servers.nats_url, "benchmark", deadline=30)
            await self._listen(self._bus)
            self._registry = Registry(self._bus, self._name)
        if self._registry is None or servers is None:
            return
        if self._plan.joining and not self._joining.started and len(self.record.steps) >= self._join_after:
            self._joining.start(servers.nats_url)
            for instance, at in self._joining.started.items():
                self.scale.begun(instance, at)
        with contextlib.suppress(MyxoError, *TRANSIENT):
            statuses = await self._registry.alive("rollout")
            self.record.gauges.append((time.time(), summed(status.gauges for status in statuses)))
            self.scale.seen(statuses, time.time())

    async def _listen(self, bus: Bus) -> None:
        names, record = Subjects(self._name), self.record

        async def step(message: Any) -> None:
            record.steps.append(Trained.decode(message.data))

        async def metrics(message: Any) -> None:
            record.written(MetricsWritten.decode(message.data))

        async def formed(message: Any) -> None:
            record.formed(BatchFormed.decode(message.data))

        async def scored(message: Any) -> None:
            record.scored(GroupsScored.decode(message.data))

        async def dropped(message: Any) -> None:
            record.ended(GroupsDropped.decode(message.data))

        async def requeued(message: Any) -> None:
            record.requeued(GroupRequeued.decode(message.data))

        async def caught_up(message: Any) -> None:
            self.scale.caught_up(ServiceEvent.decode(message.data))

        for subject, handler in (
            (names.event("trainer", "step"), step),
            (names.event("trainer", "metrics"), metrics),
            (names.ledger(BatchFormed.event()), formed),
            (names.ledger(GroupsScored.event()), scored),
            (names.ledger(GroupsDropped.event()), dropped),
            (names.ledger(GroupRequeued.event()), requeued),
            (names.event("service", CAUGHT_UP), caught_up),
        ):
            await bus.connection.subscribe(subject, cb=handler)


def _busy(watch: GpuWatch, window: tuple[float, float] | None) -> dict[str, Any]:
    return {} if window is None else {"gpu_busy": watch.busy(*window), "gpu_memory_bytes": watch.memory(*window)}


def _ended(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
