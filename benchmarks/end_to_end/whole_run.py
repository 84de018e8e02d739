"""One run under ``myxo up`` at one bound, watched from outside until it has made its steps or its time is over."""

import asyncio
import contextlib
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
from benchmarks.end_to_end.run_record import RunRecord, summed
from myxo.run.run_directory import RunDirectory
from shared.bus.bus_errors import TRANSIENT
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.runtime.errors import MyxoError
from shared.schema.ledger import GroupsDropped, GroupsScored
from shared.schema.messages import Trained
from shared.schema.service_messages import MetricsWritten

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("run.toml")

POLL_INTERVAL_S = 0.25
STOP_SECONDS = 60.0

METRICS_SECONDS = 1.0
"""The time in which the metrics of the last step come."""


@dataclass(frozen=True)
class RunPlan:
    """What every run of a measurement has in common. ``flags``: of ``myxo up``; ``steps``: to make; ``warm_up``: of them, left out at
    most: the groups that are admitted together at the beginning make one batch more than the bound.

    ``start_s``, ``run_s``: seconds for the first step, and from it on. ``gpus``: that it has.
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


def measured(plan: RunPlan, name: str, bound: int, further: Sequence[str] = (), on_gpus: bool = False) -> dict[str, Any]:
    """Returns the figures of a run with ``max_staleness = bound``; with a ``problem`` where it did not come far enough."""
    root = plan.directory / name
    shutil.rmtree(root, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "myxo.main", "up", str(CONFIG), "--fresh", "--name", name, "--dir", str(plan.directory)),
        *("--hf-checkpoint", str(plan.model), "--prompt-data", str(plan.prompts), "--max-staleness", str(bound)),
        *plan.flags,
        *further,
    ]
    watch, record, began = GpuWatch(), RunRecord(), time.time()
    if on_gpus:
        watch.start()
    plan.directory.mkdir(parents=True, exist_ok=True)
    with (plan.directory / f"{name}.out").open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            problem = asyncio.run(_watched(process, RunDirectory(root), name, plan, record))
        finally:
            _ended(process)
            watch.stop()
    warm_up = min(plan.warm_up, bound + 1)
    figures = record.figures(warm_up, plan.gpus)
    if window := record.window(warm_up):
        figures |= {"gpu_busy": watch.busy(*window), "gpu_memory_bytes": watch.memory(*window)}
    first = record.steps[0].ended - began if record.steps else None
    return {"bound": bound, "first_step_after_s": first and round(first, 1), **figures, **({"stopped": problem} if problem else {})}


async def _watched(process: subprocess.Popen[bytes], directory: RunDirectory, name: str, plan: RunPlan, record: RunRecord) -> str:
    """Follows a run until it has made its steps. Returns why it was left before, if it was."""
    end, bus = time.monotonic() + plan.start_s, None
    registry: Registry | None = None
    begun = False
    try:
        while len(record.steps) < plan.steps:
            if process.poll() is not None:
                return f"myxo up ended with {process.returncode}; its output: {directory.root}.out"
            if record.steps and not begun:
                begun, end = True, time.monotonic() + plan.run_s
            if time.monotonic() > end:
                return f"its {plan.run_s if begun else plan.start_s:g} s were over after {len(record.steps)} steps"
            if bus is None and (servers := directory.servers()) is not None:
                bus = await Bus.connect(servers.nats_url, "benchmark", deadline=30)
                await _listen(bus, name, record)
                registry = Registry(bus, name)
            if registry is not None:
                with contextlib.suppress(MyxoError, *TRANSIENT):
                    gauges = [status.gauges for status in await registry.alive("rollout")]
                    record.gauges.append((time.time(), summed(gauges)))
            await asyncio.sleep(POLL_INTERVAL_S)
        await asyncio.sleep(METRICS_SECONDS)
        return ""
    finally:
        if bus is not None:
            await bus.close()


async def _listen(bus: Bus, run: str, record: RunRecord) -> None:
    names = Subjects(run)

    async def step(message: Any) -> None:
        record.steps.append(Trained.decode(message.data))

    async def metrics(message: Any) -> None:
        record.written(MetricsWritten.decode(message.data))

    async def scored(message: Any) -> None:
        record.scored(GroupsScored.decode(message.data))

    async def dropped(message: Any) -> None:
        record.ended(GroupsDropped.decode(message.data))

    await bus.connection.subscribe(names.event("trainer", "step"), cb=step)
    await bus.connection.subscribe(names.event("trainer", "metrics"), cb=metrics)
    await bus.connection.subscribe(names.ledger(GroupsScored.event()), cb=scored)
    await bus.connection.subscribe(names.ledger(GroupsDropped.event()), cb=dropped)


def _ended(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
