"""The destinations of a trainer's metrics: each writer takes numbers by name and the step that they belong to.

A trainer that resumes makes steps again, and is told of all evaluations again. TensorBoard's files and W&B hold each step of a metric once
all the same: in the files the newest value counts; W&B takes nothing back, so there the first one stays.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from services.trainer.control_client import ControlClient
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.data.event_files import PATTERN
from shared.schema.service_messages import MetricsWritten

STEP = "step"
"""W&B's axis: its own step must only grow, and a resumed run makes steps again."""

SENT = ("model", "rollout", "trainer", "sft", "algorithm", "weights")
"""Sections of the config that W&B gets."""


class Writer(Protocol):
    """One destination."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of one step; names are those of docs/metrics.md."""

    def flush(self) -> None:
        """Shows readers what was written."""

    def close(self) -> None:
        """Writes out buffered numbers and closes the destination."""


class TensorBoard:
    """Event files of TensorBoard. All in the directory are the run's: a restart may put one in the place of several."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None
        self._held: dict[str, set[int]] = {}  # metric → steps that an earlier life wrote

    def resume(self, is_repeated: Callable[[str, int], bool]) -> None:
        """Reads the files of earlier lives; what they hold is not written again, unless ``is_repeated`` says of a metric and a step that it
        will be made again. That is removed, and so are doubles, of which the last one counts.

        All that stays then goes into one file, and the others are emptied. It begins with a restart at step 0, at which a TensorBoard that
        runs forgets what it has read; one at the resumed step would hide metrics that count other steps, as warm start and pushes do.
        """
        files, found, read = sorted(self._directory.glob(PATTERN)), dict[tuple[str, int], tuple[float, Summary.Value]](), 0
        for file in files:
            for event in LegacyEventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    read += 1
                    if not is_repeated(value.tag, event.step):
                        found[value.tag, event.step] = event.wall_time, value
        for tag, step in found:
            self._held.setdefault(tag, set()).add(step)
        if read == len(found):
            return
        scratch, path = self._directory / ".resumed", self._new_path()  # TensorBoard reads whatever has "tfevents" in its name
        with scratch.open("wb") as whole:
            _begin_file(whole)
            for _ in range(2):  # TensorBoard takes the first that it sees for the beginning
                _record(whole, step=0, session_log=SessionLog(status=SessionLog.START))
            for (step, at), values in groupby(found.items(), lambda item: (item[0][1], item[1][0])):
                _record(whole, step=step, wall_time=at, summary=Summary(value=[value for _, (_, value) in values]))
            whole.flush()
            os.fsync(whole.fileno())
        scratch.replace(path)
        for file in files:
            os.truncate(file, 0)  # not removed: a TensorBoard that reads it would never come to the next
        self._file = path.open("ab")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        fresh = {name: value for name, value in values.items() if step not in self._held.get(name, ())}
        if not fresh:
            return
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = self._new_path().open("xb")
            _begin_file(self._file)
        _record(self._file, step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=fresh[name]) for name in fresh]))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _new_path(self) -> Path:
        """Returns the path of a new file. Readers take files by their names: it is after the others', whatever the clock says."""
        newest = max(
            (int(file.name.split(".")[3]) for file in self._directory.glob(PATTERN) if file.name.split(".")[3].isdigit()), default=0
        )
        begun = max(int(time.time()), newest + 1)
        return self._directory / PATTERN.replace("*", f"{begun:010d}.{socket.gethostname()}.{os.getpid()}")


def _begin_file(file: BinaryIO) -> None:
    _record(file, file_version="brain.Event:2")


def _record(file: BinaryIO, **fields: Any) -> None:
    RecordWriter(file).write(Event(**{"wall_time": time.time(), **fields}).SerializeToString())


class Prometheus:
    """Gauges on the trainer's ``/metrics``: ``train/loss`` is ``myxo_train_loss``. They hold the newest step's numbers."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._control.gauges(values, in_status=False)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class EventStream:
    """Events on the bus, one for all that was written of a step until the next flush: for whoever watches the run from elsewhere."""

    def __init__(self, control: ControlClient, role: str) -> None:
        self._control, self._role = control, role
        self._values: dict[int, dict[str, float]] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._values.setdefault(step, {}).update(values)

    def flush(self) -> None:
        written, self._values = self._values, {}
        for step, values in written.items():
            self._control.report("metrics", MetricsWritten(role=self._role, step=step, values=values, at=time.time()))

    def close(self) -> None:
        self.flush()


class LoggedSteps:
    """The steps of each metric that W&B was given by earlier lives of a trainer.

    Args:
        path: a JSON line for each write: its step, and the metrics' names.
    """

    def __init__(self, path: Path) -> None:
        self._known: dict[str, set[int]] = {}
        for line in path.read_text().splitlines() if path.is_file() else ():
            with contextlib.suppress(ValueError):  # a life may have ended while it wrote one
                step, *names = json.loads(line)
                for name in names:
                    self._known.setdefault(name, set()).add(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def new(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the numbers that no earlier life has logged."""
        return {name: value for name, value in values.items() if step not in self._known.get(name, ())}

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Records that numbers were logged."""
        self._file.write("\n" + json.dumps([step, *values]))  # the line before may not be whole
        self._file.flush()


class WeightsAndBiases:
    """A W&B run that goes on where the trainer does; offline its files are written for ``wandb sync``.

    Args:
        role: actor or critic.

    Raises ConfigError where the package is not installed.
    """

    def __init__(self, config: RunConfig, role: str) -> None:
        devices.check(config)
        import wandb

        asked = config.monitoring
        directory = asked.wandb_dir or config.trained
        directory.mkdir(parents=True, exist_ok=True)
        name = config.run.name if role == "actor" else f"{config.run.name}-{role}"
        sections = {section: value for section, value in config.shown().model_dump(mode="json").items() if section in SENT}
        sections["rollout"].pop("sglang")  # an engine's flags may hold a key
        self._run: Any = wandb.init(
            project=asked.wandb_project,
            entity=asked.wandb_team,
            group=asked.wandb_group or config.run.name,
            name=name,
            id=name,
            job_type=role,
            mode=asked.wandb_mode,
            dir=str(directory),
            resume="allow",
            config=sections,
            settings=wandb.Settings(console="off", silent=True, **({"base_url": asked.wandb_host} if asked.wandb_host else {})),
        )
        self._run.define_metric("*", step_metric=STEP)
        self._logged = LoggedSteps(config.trained / f"wandb-{role}.jsonl")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if fresh := self._logged.new(step, values):
            self._run.log({STEP: step, **fresh})
            self._logged.logged(step, fresh)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
