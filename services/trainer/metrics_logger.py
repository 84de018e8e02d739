"""The metrics that rank 0 logs of each step, and their writers: TensorBoard, Prometheus, W&B, and the step's event. docs/metrics.md
explains every name.

A trainer that resumes makes steps again, and gets all evaluations again. TensorBoard's files and W&B hold each step of a metric once all
the same: in the files the newest value counts; W&B takes nothing back, so there the first one stays.
"""

import contextlib
import json
import os
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import structlog
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from services.trainer import batch_metrics, flops
from services.trainer.actor import Actor, StepResult
from services.trainer.batch_metrics import Table
from services.trainer.batches import TrainBatch, baselines_of, rollouts_of
from services.trainer.control_client import ControlClient
from services.trainer.flops import NOTHING, Work
from services.trainer.objective.correction import PREFIX, summarised
from services.trainer.parallel import DEVICE_TYPE
from services.trainer.partition import Partition
from services.trainer.trainer_hooks import RolloutLog
from services.trainer.weights.push_schedule import PushResult
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.data.metric_files import EVENT_FILES, METRIC_LINES
from shared.data.pass_rates import of_rollouts
from shared.model.architecture import Architecture
from shared.rewards.reward_advantage import reward_advantages
from shared.runtime.telemetry import allow_users
from shared.schema.messages import Batch, EvalFigures, RewardPart, Trained
from shared.schema.service_messages import MetricsWritten, WarmStartEnded

STEP = "step"  # W&B's axis: its own step must only grow, and a resumed run makes steps again
SENT = ("model", "rollout", "trainer", "sft", "algorithm", "weights")  # Sections of the config that W&B gets
KEPT_BACK = {"sglang", "engine_groups", "models", "external_engines", "agent_options", "agent_service", "agent_command", "train_env_vars"}
KEPT_BACK |= {"opd_teachers", "object_store_url"}  # Fields of these that may hold addresses and keys


class Writer(ABC):
    """One destination."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of one step; names are those of docs/metrics.md."""

    def flush(self) -> None:  # noqa: B027
        """Shows readers what was written."""

    def close(self) -> None:
        """Writes out buffered numbers and closes the destination."""
        self.flush()


Numbers = tuple[int, float, list[Summary.Value]]  # What was written of a step, and when (seconds since the epoch)


class TensorBoard(Writer):
    """Event files of TensorBoard, and the same numbers as lines of JSON. All in the directory are the run's: a restart may put one in the
    place of several."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None
        self._lines: TextIO | None = None
        self._held: dict[str, set[int]] = {}  # metric → steps that an earlier life wrote

    def resume(self, is_repeated: Callable[[str, int], bool]) -> None:
        """Reads the files of earlier lives; what they hold is not written again, unless ``is_repeated`` says of a metric and a step that it
        will be made again. That is removed, and so are doubles, of which the last one counts.

        All that stays then goes into one event file, and the others are emptied. It begins with a restart at step 0, at which a TensorBoard
        that runs forgets what it has read; one at the resumed step would hide metrics that count other steps, as warm start and pushes do.
        """
        files, found, read = sorted(self._directory.glob(EVENT_FILES)), dict[tuple[str, int], tuple[float, Summary.Value]](), 0
        for file in files:
            for event in LegacyEventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    read += 1
                    if not is_repeated(value.tag, event.step):
                        found[value.tag, event.step] = event.wall_time, value
        for tag, step in found:
            self._held.setdefault(tag, set()).add(step)
        kept = [
            (step, at, [value for _, (_, value) in values])
            for (step, at), values in groupby(found.items(), lambda item: (item[0][1], item[1][0]))
        ]
        if read != len(found) or (found and not (self._directory / METRIC_LINES).is_file()):  # an earlier release wrote event files alone
            self._write_lines(kept)
        if read != len(found):
            self._write_events(kept)
            for file in files:
                os.truncate(file, 0)  # not removed: a TensorBoard that reads it would never come to the next

    def _write_lines(self, kept: Sequence[Numbers]) -> None:
        scratch = self._directory / ".lines"
        with scratch.open("w") as file:
            for step, at, values in kept:
                numbers = {value.tag: value.simple_value for value in values if value.HasField("simple_value")}
                file.write(json.dumps([at, step, numbers]) + "\n")
        scratch.replace(self._directory / METRIC_LINES)

    def _write_events(self, kept: Sequence[Numbers]) -> None:
        scratch, path = self._directory / ".resumed", self._new_path()  # TensorBoard reads whatever has "tfevents" in its name
        with scratch.open("wb") as whole:
            _begin_file(whole)
            for _ in range(2):  # TensorBoard takes the first that it sees for the beginning
                _record(whole, step=0, session_log=SessionLog(status=SessionLog.START))
            for step, at, values in kept:
                _record(whole, step=step, wall_time=at, summary=Summary(value=values))
            whole.flush()
            os.fsync(whole.fileno())
        scratch.replace(path)
        self._file = path.open("ab")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        fresh = {name: value for name, value in values.items() if step not in self._held.get(name, ())}
        if not fresh:
            return
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = self._new_path().open("xb")
            _begin_file(self._file)
        if self._lines is None:
            self._lines = (self._directory / METRIC_LINES).open("a", buffering=1)
            self._lines.write("\n")  # the line before may not be whole
        self._lines.write(json.dumps([time.time(), step, fresh]) + "\n")
        _record(self._file, step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=fresh[name]) for name in fresh]))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        for file in (self._file, self._lines):
            if file is not None:
                file.close()

    def _new_path(self) -> Path:
        """Returns the path of a new file. Readers take files by their names: it is after the others', whatever the clock says."""
        newest = max(
            (int(file.name.split(".")[3]) for file in self._directory.glob(EVENT_FILES) if file.name.split(".")[3].isdigit()), default=0
        )
        begun = max(int(time.time()), newest + 1)
        return self._directory / EVENT_FILES.replace("*", f"{begun:010d}.{socket.gethostname()}.{os.getpid()}")


def _begin_file(file: BinaryIO) -> None:
    _record(file, file_version="brain.Event:2")


def _record(file: BinaryIO, **fields: Any) -> None:
    RecordWriter(file).write(Event(**{"wall_time": time.time(), **fields}).SerializeToString())


class Prometheus(Writer):
    """Gauges on the trainer's ``/metrics``: ``train/loss`` is ``myxo_train_loss``. They hold the newest step's numbers."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._control.gauges(values, in_status=False)


class EventStream(Writer):
    """Events on the bus, one for all that was written of a step until the next flush: for programs that watch the run from elsewhere."""

    def __init__(self, control: ControlClient, role: str) -> None:
        self._control, self._role = control, role
        self._values: dict[int, dict[str, float]] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._values.setdefault(step, {}).update(values)

    def flush(self) -> None:
        written, self._values = self._values, {}
        for step, values in written.items():
            self._control.report("metrics", MetricsWritten(role=self._role, step=step, values=values, at=time.time()))


class LoggedSteps:
    """The steps of each metric that W&B was given by earlier lives of a trainer, and ``run_id``: W&B's run, another one after `--fresh`.

    Args:
        path: a JSON line for each write: its step, and the metrics' names. The first has the id; where it has not, that is ``name``.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.run_id = name
        self._known: dict[str, set[int]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        if not path.stat().st_size:
            self.logged(-1, [f"{name}-{time.time_ns():x}"])
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a life may have ended while it wrote one
                step, *names = json.loads(line)
                self.run_id = names[0] if step == -1 else self.run_id
                for name in names:
                    self._known.setdefault(name, set()).add(step)

    def new(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the numbers that no earlier life has logged."""
        return {name: value for name, value in values.items() if step not in self._known.get(name, ())}

    def logged(self, step: int, values: Iterable[str]) -> None:
        """Records that numbers were logged."""
        self._file.write("\n" + json.dumps([step, *values]))  # the line before may not be whole
        self._file.flush()


class WeightsAndBiases(Writer):
    """A W&B run that continues where the trainer does; offline its files are written for ``wandb sync``.

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
        given = config.shown().model_dump(mode="json", include=set(SENT))
        sections = {section: {name: fields[name] for name in fields if name not in KEPT_BACK} for section, fields in given.items()}
        self._logged = LoggedSteps(config.trained / f"wandb-{role}.jsonl", name)
        self._run: Any = wandb.init(
            project=asked.wandb_project,
            entity=asked.wandb_team,
            group=asked.wandb_group or config.run.name,
            name=name,
            id=self._logged.run_id,
            job_type=role,
            mode=asked.wandb_mode,
            dir=str(directory),
            resume="allow",
            config=sections,
            settings=wandb.Settings(console="off", silent=True, **({"base_url": asked.wandb_host} if asked.wandb_host else {})),
        )
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if fresh := self._logged.new(step, values):
            self._run.log({STEP: step, **fresh})
            self._logged.logged(step, fresh)

    def close(self) -> None:
        self._run.finish()


SUMS = ("agreement_abs_diff", "agreement_tokens")  # Metrics of the loss that stay sums over a batch's optimizer steps; the others are means
MOST_PARTS = 64  # The most names of rewards that one trainer process writes: each makes four time series that are never removed
SFT_SHOWN_SECONDS = 1.0  # The least time between two flushes of the warm start's numbers, whose steps are short

_ILLEGAL = re.compile(r"[^-/\w.]")  # TensorBoard's own rule; W&B and Prometheus then have the same names


@dataclass(frozen=True)
class TrainingSpeed:
    """The training speed of a role's model, in FLOP/s of its own arithmetic and as a fraction of its devices' peak.

    Args:
        ranks: devices that train together. peak: operations a second of one of them; None: not known. value_head: whether it is a critic.
        adapters: whether only adapters train.
    """

    architecture: Architecture
    ranks: int
    peak: float | None
    value_head: bool = False
    adapters: bool = False

    @classmethod
    def of(cls, actor: Actor) -> "TrainingSpeed":
        device = torch.cuda.get_device_name() if DEVICE_TYPE == "cuda" else "cpu"  # parameters may lie in host memory
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        settings = actor.settings
        peak = flops.peak(device, settings.trainer.train_dtype)
        return cls(actor.counted_architecture, ranks, peak, settings.value_head, settings.lora is not None)

    def of_step(self, lengths: Sequence[int], seconds: float, shared: Work = NOTHING) -> dict[str, float]:
        """Returns TFLOP/s of each device, and MFU where the peak is known.

        Args:
            lengths: tokens of each sample of the whole batch. shared: what they have in common that is computed once.
        """
        operations = flops.training(self.architecture, lengths, shared=shared, value_head=self.value_head, adapters=self.adapters)
        rate = operations / seconds / self.ranks
        return {"actor_train_tflops": rate / 1e12} | ({} if self.peak is None else {"actor_train_mfu": rate / self.peak})


# Gauges of the newest step, and the metrics that they show
_SAME = "loss", "grad_norm", "reward", "staleness_mean", "staleness_max", "masked_tokens", "removed_samples", "wait_time_ratio"
GAUGES = {name: name for name in _SAME} | {"train_compute_tokens_per_s": "actor_train_tok_per_s", "train_tokens_per_s": "wall_tok_per_s"}


class MetricsLogger:
    """The metrics of one trainer process.

    Args:
        speed: of the model that is trained; None: there is none. role: actor or critic. log: the user's own function for samples.
    """

    def __init__(
        self, control: ControlClient, config: RunConfig, speed: TrainingSpeed | None, role: str = "actor", log: RolloutLog | None = None
    ) -> None:
        self._control, self._config, self._objective = control, config, config.algorithm
        directory = config.trained / "tensorboard" / ("" if role == "actor" else role)
        self._tensorboard = TensorBoard(directory)
        self._writers: list[Writer] = [self._tensorboard, Prometheus(control), EventStream(control, role)]
        if config.monitoring.use_wandb:
            self._writers.append(WeightsAndBiases(config, role))
        self._speed, self._role, self._log = speed, role, log
        self._parts = RewardParts()
        self._last_end: float | None = None
        self._sft_losses: list[float] = []
        self._sft_first = self._sft_shown = 0.0
        self._zero_std: dict[str, float] = {}
        self._evaluated = 0  # of the evaluations that the buffer has reported
        self._pushed = -1  # the newest version whose push is written

    def resume(self, steps: int, *, sft_done: bool = True) -> None:
        """Prepares the writers for a trainer that continues after so many ``steps``; called before anything is written.

        Later steps are trained again, and the buffer reports all evaluations again. Of a version's pushes the first one counts.
        """

        def is_repeated(name: str, step: int) -> bool:
            return not sft_done if name.startswith("sft/") else step >= steps and not name.startswith("perf/update_weights_")

        self._tensorboard.resume(is_repeated)

    def step(
        self,
        batch: TrainBatch,
        results: list[StepResult],
        started: float,
        ended: float,
        *,
        optimized: float,
        parts: Mapping[str, float],
        token_means: Mapping[str, float],
        shared: Work = NOTHING,
    ) -> None:
        """Writes one step: the mean over its optimizer steps; sums of agreement stay sums. Without any the critic learns alone.

        Args:
            started, ended: seconds since the epoch. optimized: seconds of its optimizer steps. parts: `StepClock`'s since the step before.
            token_means: all ranks'.
            shared: of all ranks, what samples have in common that is computed once.
        """
        metrics = {}
        if results:
            metrics = averaged(results) | ({"support_mismatch": 1.0} if self._config.support_mismatch else {})
            metrics = summarised(metrics, self._config.monitoring.logprob_alarm)
        performance = self._performance(batch, started, ended, optimized if results else None, parts, shared)
        self._write(batch.step, "train", metrics)
        if self._log is None or not self._log.wrote(batch.partition, performance["train_wait_time"]):
            self._write_samples(batch.partition, batch.sample_stats, token_means, batch.raw, batch.rewards)
        self._write(batch.step, "perf", performance)
        self._report(batch.partition.batch, started, ended, {**metrics, **batch.metrics, **performance})

    def recorded(self, partition: Partition, sample_stats: Table, started: float, ended: float) -> None:
        """Writes one batch of a run that trains nothing. ``started``, ``ended``: seconds since the epoch, of its reading."""
        self._write_samples(partition, sample_stats, {})
        self._report(partition.batch, started, ended, batch_metrics.metrics_of_batch(partition.batch, sample_stats))

    def _report(self, batch: Batch, started: float, ended: float, metrics: Mapping[str, float]) -> None:
        """Ends a step: its event, its gauges, and the evaluations that have ended."""
        self._control.report("step", Trained(step=batch.step, version=batch.version, started=started, ended=ended, metrics=metrics))
        gauges = {gauge: metrics[name] for gauge, name in GAUGES.items() if name in metrics}
        self._control.gauges({"step": batch.step + 1, **gauges})
        self.evaluations()
        self._flush()

    def critic(self, batch: TrainBatch, results: list[StepResult], started: float, ended: float) -> None:
        """Writes one step of the critic: the means over its optimizer steps."""
        metrics = averaged(results) | {"step_time": ended - started}
        self._write(batch.step, "critic", metrics)
        self._control.gauges({"step": batch.step + 1, **{name: metrics[name] for name in ("value_loss", "value_clipfrac", "grad_norm")}})
        self._flush()

    def sft(self, step: int, steps: int, result: StepResult) -> None:
        """Writes one step of the warm start, the ``step``-th of ``steps``; the last one's end is reported with all losses."""
        self._write(step, "sft", {"loss": result.loss, "lr": result.lr})
        gauges = {"sft_step": step, "sft_steps": steps, "sft_loss": result.loss}
        now = time.monotonic()
        if step == 1:
            self._sft_losses, self._sft_first = [], now  # the first step warms the device up and is left out of the speed
        else:
            gauges["sft_seconds_left"] = (now - self._sft_first) / (step - 1) * (steps - step)
        self._sft_losses.append(result.loss)
        self._control.gauges(gauges)
        if step == steps or now - self._sft_shown > SFT_SHOWN_SECONDS:
            self._sft_shown = now
            self._flush()
        if step == steps:
            self._control.report("warm_start", WarmStartEnded.of(self._sft_losses))

    def push(self, result: PushResult) -> None:
        """Writes one push of weights; its step is the version."""
        values = {
            "update_weights_time": result.seconds,
            "update_weights_wire_time": result.wire_seconds,
            "update_weights_stall": result.stall,
            "update_weights_bytes": result.bytes,
            "update_weights_gb_per_s": result.gb_per_s,
            **{f"update_weights_{phase}_time": seconds for phase, seconds in result.phases.items()},
        }
        if result.version > self._pushed:  # not one that a late replica gets
            self._write(result.version, "perf", values)
            self._pushed = result.version
        pace = {"push_seconds": result.seconds, "push_stall_seconds": result.stall, "push_gb_per_s": result.gb_per_s}
        self._control.gauges({"version": result.version, **pace})
        self.evaluations()
        self._flush()

    def evaluations(self) -> None:
        """Writes the evaluations that have ended since it was last called; their step is the version's."""
        ended, self._evaluated = self._control.evaluations[self._evaluated :], len(self._control.evaluations)
        for figures in ended:
            if not figures.logged:
                step = self._config.steps_of_version(figures.version)
                self._write(step, "eval", evaluation_metrics(figures))
                named = {_ILLEGAL.sub("_", name): value for name, value in figures.metrics.items()}
                allow_users(named)
                for writer in self._writers:
                    writer.write(step, named)

    def close(self) -> None:
        if self._role == "actor":
            self.evaluations()
        for writer in self._writers:
            writer.close()

    def _flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def _write_samples(
        self,
        partition: Partition,
        sample_stats: Table,
        token_means: Mapping[str, float],
        raw: Sequence[float] | None = None,
        rewards: Sequence[float] | None = None,
    ) -> None:
        """Writes what is known of a batch's samples before they are trained.

        Args:
            raw, rewards: as functions of the user's show them, and as advantages are made of them; None: the samples' own.
        """
        batch, raw = partition.batch, partition.rewards if raw is None else raw
        shown = self._rollout(partition, sample_stats, partition.rewards if rewards is None else rewards)
        self._write(batch.step, "rollout", {**shown, "raw_reward": sum(raw) / len(raw), **token_means})
        self._write(batch.step, "perf", batch_metrics.engine_metrics(sample_stats))
        self._write(batch.step, "rewards", self._parts.metrics(batch.parts))
        if self._config.monitoring.log_passrate:
            found = iter(zip(raw, (rollout for _, rollout in rollouts_of(partition, sample_stats)), strict=True))
            groups = [of_rollouts(*zip(*(next(found) for _ in group.rewards), strict=True)) for group in batch.groups]
            rates = batch_metrics.passrate(groups, self._config.monitoring.passrate_threshold)
            self._write(batch.step, "passrate", rates)
        if self._config.monitoring.log_multi_turn:
            turns = batch_metrics.multi_turn(sample_stats, self._config.rollout.rollout_max_response_len)
            self._write(batch.step, "multi_turn", turns)

    def _write(self, step: int, prefix: str, values: Mapping[str, float]) -> None:
        named = {f"{prefix}/{name}": float(value) for name, value in values.items()}
        for writer in self._writers:
            writer.write(step, named)

    def _performance(
        self, batch: TrainBatch, started: float, ended: float, optimized: float | None, parts: Mapping[str, float], shared: Work
    ) -> dict[str, float]:
        """Returns the speed of a step. ``optimized``: None where the actor did not learn."""
        seconds = max(ended - started, 1e-9)
        waited = 0.0 if self._last_end is None else started - self._last_end
        found = {"step_time": seconds, "train_wait_time": waited, "wait_time_ratio": waited / (waited + seconds)}
        if self._last_end is not None:  # what the first step waited for is not known
            found["wall_tok_per_s"] = batch.metrics["tokens"] / (waited + seconds)
        before = {"idle", "push", "save", "rest"} if self._last_end is None else set()  # no step's
        found |= {f"train_{part}_time": 0.0 if part in before else spent for part, spent in parts.items()}
        self._last_end = ended
        if optimized is None:
            return found
        training, tokens = max(optimized, 1e-9), batch.metrics["tokens"]
        found |= {"actor_train_time": training, "actor_train_tok_per_s": tokens / training}
        found["actor_train_computed_tokens"] = tokens - shared.tokens
        assert self._speed is not None  # of a model that is trained
        return found | self._speed.of_step([item.tokens for item in batch.partition.items], training, shared)

    def _rollout(self, partition: Partition, sample_stats: Table, rewards: Sequence[float]) -> dict[str, float]:
        shaped = None
        if self._objective.loss_type != "sft_loss":
            groups, rollouts = baselines_of(partition, sample_stats), rollouts_of(partition, sample_stats)
            shaped = reward_advantages(self._objective, rewards, groups, rollouts).tolist()
        found = batch_metrics.rollout_metrics(partition.batch, sample_stats, shaped)
        equal = {name: value for name, value in found.items() if name.startswith("zero_std/")}
        self._zero_std = {**dict.fromkeys(self._zero_std, 0.0), **equal}  # a reward that once had a group is written as 0 from then on
        return found | self._zero_std


class RewardParts:
    """Named rewards as metrics: users' names are made legal for every writer; only the first `MOST_PARTS` names are written."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._warned = False

    def metrics(self, parts: Mapping[str, RewardPart]) -> dict[str, float]:
        """Returns ``<part>/mean`` and ``std``, ``min``, ``max`` beside it, without the prefix ``rewards/``."""
        found: dict[str, float] = {}
        for given, part in parts.items():
            name = _ILLEGAL.sub("_", given)
            if name not in self._names and len(self._names) >= MOST_PARTS:
                if not self._warned:
                    structlog.get_logger().warning("reward_parts_left_out", first=name, most=MOST_PARTS)
                self._warned = True
                continue
            self._names.add(name)
            values = {"mean": part.mean, "std": part.std, "min": part.min, "max": part.max}
            found.update({f"{name}/{what}": value for what, value in values.items()})
        return found


def evaluation_metrics(figures: EvalFigures) -> dict[str, float]:
    """Returns the metrics of an evaluation under slime's names and some of our own, without the prefix ``eval/``.

    Without samples there are no figures but those that say so.
    """
    name = figures.dataset
    labels = {"version": figures.version, "newest_version": figures.newest, "lag": figures.lag, "samples": figures.samples}
    labels |= {"failed": figures.failed, "late": figures.late}
    found = {f"{name}/{label}": float(value) for label, value in labels.items()} | {f"{name}/seconds": figures.seconds}
    if not figures.samples:
        return found
    found |= {name: figures.mean_reward, f"{name}-truncated_ratio": figures.truncated}
    found |= {f"{name}-{rate}": value for rate, value in figures.rates.items()}
    return found | {f"{name}/response_len/{what}": value for what, value in figures.lengths.items()}


def averaged(results: Sequence[StepResult]) -> dict[str, float]:
    """Returns the metrics of a batch's optimizer steps: means, sums of `SUMS` and counts, norm and rate of the last."""
    names = results[0].metrics
    metrics = {name: sum(result.metrics[name] for result in results) / len(results) for name in names}
    metrics |= {name: sum(result.metrics[name] for result in results) for name in names if name in SUMS or name.startswith(PREFIX)}
    return metrics | {"grad_norm": results[-1].grad_norm, "lr": results[-1].lr}
