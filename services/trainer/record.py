"""What rank 0 writes down of each step: TensorBoard, live gauges, the step event."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from services.trainer.actor import StepResult
from services.trainer.batches import TrainBatch
from services.trainer.link import Link
from services.trainer.push import PushResult
from shared.messages import TrainerStep


class Record:
    """Measurements of one trainer life.

    Args:
        directory: TensorBoard's; names are slime's (``train/…``, ``rollout/…``, ``perf/…``).
    """

    def __init__(self, link: Link, directory: Path) -> None:
        self._link = link
        self._writer = SummaryWriter(str(directory))
        self._last_end: float | None = None

    def step(self, batch: TrainBatch, results: list[StepResult], started: float, ended: float) -> None:
        """One training step: the mean over its optimizer steps; sums of agreement stay sums."""
        names = results[0].metrics
        metrics = {name: sum(result.metrics[name] for result in results) / len(results) for name in names}
        for name in ("agreement_abs_diff", "agreement_tokens"):
            if name in names:
                metrics[name] = sum(result.metrics[name] for result in results)
        metrics |= {"grad_norm": results[-1].grad_norm, "lr": results[-1].lr}
        figures = asdict(batch.figures)
        seconds = max(ended - started, 1e-9)
        waited = 0.0 if self._last_end is None else started - self._last_end
        self._last_end = ended
        performance = {
            "step_time": seconds,
            "train_wait_time": waited,
            "wait_time_ratio": waited / (waited + seconds),
            "actor_train_tok_per_s": batch.figures.tokens / seconds,
        }
        for prefix, values in (("train", metrics), ("rollout", figures), ("perf", performance)):
            for name, value in values.items():
                self._writer.add_scalar(f"{prefix}/{name}", value, batch.step)
        event = TrainerStep(
            step=batch.step, version=batch.version, started=started, ended=ended, metrics={**metrics, **figures, **performance}
        )
        self._link.report_step(event)
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
                "train_tokens_per_s": performance["actor_train_tok_per_s"],
                "wait_time_ratio": performance["wait_time_ratio"],
            }
        )

    def sft(self, step: int, steps: int, result: StepResult) -> None:
        """One step of the warm start."""
        self._writer.add_scalar("sft/loss", result.loss, step)
        self._writer.add_scalar("sft/lr", result.lr, step)
        self._link.gauges({"sft_step": step, "sft_steps": steps, "sft_loss": result.loss})

    def push(self, result: PushResult) -> None:
        """One push of weights."""
        values = {"update_weights_time": result.seconds, "update_weights_stall": result.stall, "update_weights_bytes": float(result.bytes)}
        for name, value in values.items():
            self._writer.add_scalar(f"perf/{name}", value, result.version)
        self._link.gauges(
            {"version": result.version, "push_seconds": result.seconds, "push_gb_per_s": result.bytes / max(result.seconds, 1e-9) / 1e9}
        )

    def close(self) -> None:
        self._writer.close()
