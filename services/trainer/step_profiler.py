"""Traces of chosen steps with PyTorch's profiler, and records of the trainer's allocations, of one rank.

Only one trace runs at a time: where `train_overall` is traced, the other parts are marked in it; otherwise each step's parts have traces of
their own. Traces are Chrome's, for TensorBoard, Perfetto and ``chrome://tracing``.
"""

import contextlib
import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shared.config.run_config import RunConfig
from shared.config.service_sections import DebugSection

DIRECTORY = "profile"  # where traces lie, in the run's directory
MOST_ENTRIES = 1_000_000  # allocations that are kept of the memory's history

Part = Literal["train_actor", "train_log_probs"]

STEP_PARTS = ("idle", "prepare", "log_probs", "gradient", "optimizer", "push", "save", "rest")


class StepClock:
    """The seconds that each of `STEP_PARTS` took since the last step: a part within another interrupts it, what is in none is the rest."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(STEP_PARTS, 0.0)
        self._open, self._since = ["rest"], time.monotonic()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the body's time to a part, once the device has done what the body began."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def ended(self) -> dict[str, float]:
        """Returns the seconds of each part; the next step begins."""
        self._charge()
        spent, self._spent = self._spent, dict.fromkeys(STEP_PARTS, 0.0)
        return spent

    def _charge(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        now = time.monotonic()
        self._spent[self._open[-1]] += now - self._since
        self._since = now


class StepProfiler:
    """The profiler of one rank. Without `use_pytorch_profiler` it does nothing."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        debug = config.debug
        self._targets = set(debug.profile_target) if debug.use_pytorch_profiler else set()
        self._steps = range(debug.profile_step_start, debug.profile_step_end)
        self._directory, self._rank, self._step = config.trained / DIRECTORY, rank, -1
        self._overall: profile | None = None
        self._memory = MemoryHistory(debug, debug.memory_snapshot_dir or self._directory, rank) if debug.record_memory_history else None
        self._log: Any = structlog.get_logger()

    def begin(self, step: int) -> None:
        """Notes that a step begins."""
        self._step = step
        if "train_overall" in self._targets and step in self._steps and self._overall is None:
            self._overall = _profile()
            self._overall.start()

    def end(self) -> None:
        """Notes that the step has ended."""
        if self._overall is not None and self._step + 1 not in self._steps:
            self._end_trace()
        if self._memory is not None:
            self._memory.step()

    @contextlib.contextmanager
    def part(self, part: Part, of: str = "") -> Iterator[None]:
        """Traces the body, a part of the present step, where that is asked for. ``of``: distinguishes it from others in the step."""
        if self._overall is not None:
            with record_function(part + of):
                yield
        elif part in self._targets and self._step in self._steps:
            trace = _profile()
            trace.start()
            try:
                yield
            finally:
                self._write(trace, f"{part}{of}_rank_{self._rank}_step_{self._step}")
        else:
            yield

    def close(self) -> None:
        """Writes the trace that is being recorded."""
        if self._memory is not None:
            self._memory.close()
        self._end_trace()

    def _end_trace(self) -> None:
        trace, self._overall = self._overall, None
        if trace is not None:
            self._write(trace, f"train_overall_rank_{self._rank}_steps_{self._steps.start}_to_{self._step}")

    def _write(self, trace: profile, name: str) -> None:
        trace.stop()
        path = self._directory / f"{name}.pt.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
            self._log.info("profile_written", path=str(path))
        except (OSError, RuntimeError) as error:
            self._log.error("profile_not_written", path=str(path), error=str(error))


def _profile() -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, record_shapes=True, with_stack=True, profile_memory=True, with_flops=True)


class MemoryHistory:
    """The record of this process's allocations, begun at once, written after `memory_snapshot_num_steps` steps, and when memory runs out.

    PyTorch's recorder knows CUDA's allocator alone; memray's tracker knows the host's.
    """

    def __init__(self, debug: DebugSection, directory: Path, rank: int) -> None:
        self._left, self._recorder = debug.memory_snapshot_num_steps, debug.memory_recorder
        end = debug.memory_snapshot_path or ("snapshot.pickle" if self._recorder == "torch" else "snapshot.memray")
        self._path = directory / f"memory_snapshot_rank{rank}_{end}"
        self._tracker: Any = None
        self._log: Any = structlog.get_logger()
        directory.mkdir(parents=True, exist_ok=True)
        if self._recorder == "memray":
            self._path.unlink(missing_ok=True)  # memray refuses to write over a file
            self._tracker = importlib.import_module("memray").Tracker(str(self._path), native_traces=True)
            self._tracker.__enter__()
        else:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="all")
            torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._dump())  # type: ignore[attr-defined]

    def step(self) -> None:
        """Notes the end of a step."""
        if self._left is None:
            return
        self._left -= 1
        if self._left == 0:
            self._left = None
            self._finish()

    def close(self) -> None:
        """Ends a record of memray's, whose file is written as it goes."""
        if self._tracker is not None:
            self._finish()

    def _finish(self) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
            self._tracker = None
        else:
            self._dump()
            torch.cuda.memory._record_memory_history(enabled=None)
        self._log.info("memory_history_written", path=str(self._path))

    def _dump(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self._path))
