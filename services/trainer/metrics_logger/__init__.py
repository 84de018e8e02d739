"""What rank 0 writes down of each step: TensorBoard, Prometheus, W&B, and the step's event. docs/metrics.md tells every name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from services.trainer import batch_metrics
from services.trainer.actor import Actor, StepResult
from services.trainer.batches import TrainBatch
from services.trainer.control_client import ControlClient
from services.trainer.metrics_logger.reward_part_metrics import RewardParts
from services.trainer.metrics_logger.speed import Speed
from services.trainer.metrics_logger.weights_and_biases import WeightsAndBiases
from services.trainer.metrics_logger.writers import Prometheus, TensorBoard, Writer
from services.trainer.objective import reward_advantages
from services.trainer.sample_stats import StatColumn
from services.trainer.weights.push_schedule import PushResult
from shared.config.run_config import RunConfig
from shared.schema.messages import TrainerStep, WarmStartEnded

SUMS = ("agreement_abs_diff", "agreement_tokens")
"""Metrics of the loss that stay sums over a batch's optimizer steps; the others are means."""

SAME = ("reward", "truncated")
"""Figures that are written under slime's names, raw_reward and truncated_ratio."""


class MetricsLogger:
    """Measurements of one trainer life.

    Args:
        directory: TensorBoard's. job: actor or critic. actor: the model that is trained; None: its speed is not told in FLOP/s.
    """

    def __init__(self, link: ControlClient, directory: Path, config: RunConfig, actor: Actor | None = None, job: str = "actor") -> None:
        self._link, self._config, self._objective = link, config, config.algorithm
        self._writers: list[Writer] = [TensorBoard(directory), Prometheus(link)]
        if config.monitoring.use_wandb:
            self._writers.append(WeightsAndBiases(config, job))
        self._speed = Speed.of(actor) if actor is not None else None
        self._job = job
        self._parts = RewardParts()
        self._last_end: float | None = None
        self._sft_losses: list[float] = []
        self._sft_first = 0.0
        self._equal: dict[str, float] = {}
        self._evaluated: dict[str, int] = {}

    def step(
        self,
        batch: TrainBatch,
        results: list[StepResult],
        started: float,
        ended: float,
        *,
        optimized: float | None = None,
        token_means: Mapping[str, float] | None = None,
    ) -> None:
        """One training step: the mean over its optimizer steps; sums of agreement stay sums.

        Args:
            started, ended: seconds since the epoch. optimized: seconds of its optimizer steps; None: all of it. token_means: of
                `figures.TokenSums`, all ranks'.
        """
        metrics = averaged(results)
        performance = self._performance(batch, started, ended, optimized)
        plain = {name: value for name, value in asdict(batch.figures).items() if name not in SAME}
        rollout = {**plain, **self._rollout(batch), **(token_means or {})}
        self._write(batch.step, {**_named("train", metrics), **_named("rollout", rollout), **_named("perf", performance)})
        self._write(batch.step, self._parts.metrics(batch.deal.batch.parts))
        if self._config.monitoring.log_passrate:
            rates = batch_metrics.passrate([group.rewards for group in batch.deal.batch.groups], self._config.monitoring.passrate_threshold)
            self._write(batch.step, _named("passrate", rates))
        told = {**metrics, **asdict(batch.figures), **performance}
        self._link.report_step(TrainerStep(step=batch.step, version=batch.version, started=started, ended=ended, metrics=told))
        self._link.gauges(
            {
                "step": batch.step + 1,
                "reward": batch.figures.reward,
                "loss": metrics["loss"],
                "grad_norm": metrics["grad_norm"],
                "staleness_mean": batch.figures.staleness_mean,
                "staleness_max": batch.figures.staleness_max,
                "masked_tokens": batch.figures.masked_tokens,
                "removed_samples": batch.figures.removed_samples,
                **({"train_tokens_per_s": performance["wall_tok_per_s"]} if "wall_tok_per_s" in performance else {}),
                "train_compute_tokens_per_s": performance["actor_train_tok_per_s"],
                "wait_time_ratio": performance["wait_time_ratio"],
            }
        )
        self.evaluations()

    def critic(self, batch: TrainBatch, results: list[StepResult], started: float, ended: float) -> None:
        """One step of the critic: the means over its optimizer steps."""
        metrics = averaged(results) | {"step_time": ended - started}
        self._write(batch.step, _named("critic", metrics))
        self._link.gauges({"step": batch.step + 1, **{name: metrics[name] for name in ("value_loss", "value_clipfrac", "grad_norm")}})

    def sft(self, step: int, steps: int, result: StepResult) -> None:
        """One step of the warm start, the ``step``-th of ``steps``; the last one's end is told with all losses."""
        self._write(step, {"sft/loss": result.loss, "sft/lr": result.lr})
        gauges = {"sft_step": step, "sft_steps": steps, "sft_loss": result.loss}
        now = time.monotonic()
        if step == 1:
            self._sft_losses, self._sft_first = [], now  # the first step warms the device up: the pace is that of the others
        else:
            gauges["sft_seconds_left"] = (now - self._sft_first) / (step - 1) * (steps - step)
        self._sft_losses.append(result.loss)
        self._link.gauges(gauges)
        if step == steps:
            self._link.report_warm_start(WarmStartEnded.of(self._sft_losses))

    def push(self, result: PushResult) -> None:
        """One push of weights; its step is the version."""
        values = {
            "update_weights_time": result.seconds,
            "update_weights_wire_time": result.wire_seconds,
            "update_weights_stall": result.stall,
            "update_weights_bytes": float(result.bytes),
            "update_weights_gb_per_s": result.gb_per_s,
        }
        self._write(result.version, _named("perf", values))
        self._link.gauges(
            {
                "version": result.version,
                "push_seconds": result.seconds,
                "push_stall_seconds": result.stall,
                "push_gb_per_s": result.gb_per_s,
            }
        )
        self.evaluations()

    def evaluations(self) -> None:
        """Writes the evaluations that have ended since it was last asked; their step is the version's."""
        for name, (version, reward) in self._link.evaluations.items():
            if self._evaluated.get(name) != version:
                self._evaluated[name] = version
                self._write(version * self._config.weights.update_weights_interval, {f"eval/{name}": reward})

    def close(self) -> None:
        if self._job == "actor":
            self.evaluations()
        for writer in self._writers:
            writer.close()

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def _performance(self, batch: TrainBatch, started: float, ended: float, optimized: float | None) -> dict[str, float]:
        seconds = max(ended - started, 1e-9)
        training = max(seconds if optimized is None else optimized, 1e-9)
        waited, first = (0.0, True) if self._last_end is None else (started - self._last_end, False)
        self._last_end = ended
        found = {
            "step_time": seconds,
            "actor_train_time": training,
            "train_wait_time": waited,
            "wait_time_ratio": waited / (waited + seconds),
            "actor_train_tok_per_s": batch.figures.tokens / training,
        }
        if not first:  # nobody knows what the first step waited for
            found["wall_tok_per_s"] = batch.figures.tokens / (waited + seconds)
        return found | (self._speed.of_step([item.tokens for item in batch.deal.items], training) if self._speed is not None else {})

    def _rollout(self, batch: TrainBatch) -> dict[str, float]:
        groups, facts, objective = batch.deal.batch.groups, batch.facts, self._objective
        rewards, numbers = [reward for group in groups for reward in group.rewards], [item.group for item in batch.deal.items]
        rollouts = list(zip(numbers, facts.integers(StatColumn.ROLLOUT), strict=True))
        found = batch_metrics.rollout(
            rewards,
            numbers,
            facts.integers(StatColumn.RESPONSE),
            truncated=facts.column(StatColumn.TRUNCATED),
            looping=facts.column(StatColumn.LOOPING),
            shaped=None if objective.loss_type == "sft_loss" else reward_advantages(objective, rewards, numbers, rollouts).tolist(),
        )
        equal = {name: value for name, value in found.items() if name.startswith("zero_std/")}
        self._equal = {**dict.fromkeys(self._equal, 0.0), **equal}  # a reward of which there was a group once is told as 0 from then on
        return found | self._equal


def averaged(results: Sequence[StepResult]) -> dict[str, float]:
    """Metrics of a batch's optimizer steps: means, sums where they are `SUMS`, norm and rate of the last."""
    names = results[0].metrics
    metrics = {name: sum(result.metrics[name] for result in results) / len(results) for name in names}
    metrics |= {name: sum(result.metrics[name] for result in results) for name in SUMS if name in names}
    return metrics | {"grad_norm": results[-1].grad_norm, "lr": results[-1].lr}


def _named(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": float(value) for name, value in values.items()}
