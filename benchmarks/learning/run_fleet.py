"""Several runs at once on one machine, watched until they end or the time is over."""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.learning_run import LearningRun, curve, environment
from shared.process.child_process import ChildProcess

POLL_INTERVAL_S = 2.0
STOP_GRACE_S = 20.0
"""The seconds that a run has to end in order when the time is over."""

FINISHED, FAILED, CUT_OFF, RUNNING = "finished", "failed", "cut off", "running"


@dataclass
class _Slot:
    """A place for one run after the other. ``index``: says which GPUs are its."""

    index: int
    run: LearningRun | None = None
    process: ChildProcess | None = None


class RunFleet:
    """Runs ``runs``, ``jobs`` at a time, in order.

    Args:
        data, directory, flags: as `LearningRun.command` takes them. gpus: that the runs share.
        tell: is called with a run and its figures whenever they may have changed: its state, its seconds, and its `curve`.
    """

    def __init__(
        self,
        runs: Sequence[LearningRun],
        tell: Callable[[LearningRun, dict[str, Any]], None],
        *,
        jobs: int,
        gpus: int,
        data: Path,
        directory: Path,
        flags: Sequence[str] = (),
    ) -> None:
        self._waiting, self._tell = list(runs), tell
        self._slots = [_Slot(index) for index in range(jobs)]
        self._gpus, self._data, self._directory, self._flags = gpus, data, directory, list(flags)

    def run(self, seconds: float) -> None:
        """Runs all of them. After ``seconds`` those that still run are ended, and the others are not begun."""
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline and (self._waiting or any(slot.run for slot in self._slots)):
                for slot in self._slots:
                    if slot.run is None and self._waiting:
                        self._begin(slot, self._waiting.pop(0))
                time.sleep(POLL_INTERVAL_S)
                for slot in self._slots:
                    self._look(slot)
        finally:
            self._end()

    def _begin(self, slot: _Slot, run: LearningRun) -> None:
        command = run.command(self._data, self._directory, self._flags)
        log = self._directory / f"{run.name}.log"
        shutil.rmtree(self._directory / run.name, ignore_errors=True)  # an earlier one's curve is not this one's
        slot.run, slot.process = run, ChildProcess(run.name, command, log, environment(slot.index, run.device, self._gpus))

    def _look(self, slot: _Slot) -> None:
        if slot.run is None or slot.process is None:
            return
        run, process, code = slot.run, slot.process, slot.process.exit_code()
        if code is not None:
            slot.run = slot.process = None
        self._report(run, process, RUNNING if code is None else FAILED if code else FINISHED)

    def _report(self, run: LearningRun, process: ChildProcess, state: str) -> None:
        figures = {"state": state, "seconds": round(time.monotonic() - process.started_s, 1), **curve(self._directory / run.name)}
        if state == FAILED:
            figures["error"] = " ".join(process.last_lines(5))[-1000:]
        self._tell(run, figures)

    def _end(self) -> None:
        """Ends what still runs, all at once: what it has learned so far counts."""
        left = [(slot.run, slot.process) for slot in self._slots if slot.run is not None and slot.process is not None]
        for run, process in left:
            self._report(run, process, CUT_OFF)
        with ThreadPoolExecutor(max(len(left), 1)) as threads:
            list(threads.map(lambda item: item[1].stop(STOP_GRACE_S), left))
